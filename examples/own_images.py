"""Images of your own in folders, and a network that a DataLoader trained on them; the stages of a fit one by one.

    python examples/own_images.py           (with digits, written as files first)
    python examples/own_images.py images    (images/train/CLASS/, val/CLASS/, test/CLASS/ and other/)

Prints how many test images are right, how many are accepted, and how many of those are right; and what is called out
of distribution. Change PREPROCESS and the network below to yours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

from digits import digit_folders, train
from own_model import SmallNet
from torchvision import transforms
from torchvision.datasets import ImageFolder

from psc_core import Preprocess, fit_projection, fit_psc, measure_collapse, open_dataset

# How an image becomes an input: once for the DataLoader, once for PSC.  Both must be the same.
TRANSFORM = transforms.Compose(
    [transforms.Grayscale(), transforms.Resize((28, 28)), transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)]
)
PREPROCESS = Preprocess("L", height=28, width=28, resize=None, mean=(0.1307,), std=(0.3081,))

images = Path(sys.argv[1]) if len(sys.argv) > 1 else digit_folders()
of_loader = ImageFolder(images / "train", TRANSFORM)
net = train(SmallNet(len(of_loader.classes)), of_loader, epochs=6)

# Three stages over the folders: a layer, its projection, and what is fitted to it.
train_images, val_images = (
    open_dataset(str(images / split), split=split, preprocess=PREPROCESS) for split in ("train", "val")
)
chosen = measure_collapse(net, train_images, val_images).choose()
projection = fit_projection(net, chosen, train_images, val_images)
psc = fit_psc(net, chosen, projection, train_images, val_images)
print(f"reads {psc.layer}; an image with a p-value of at most {psc.policy.alpha} is out of distribution")

files = sorted((images / "test").glob("*/*"))
prediction = psc.predict(files)
right = [label == file.parent.name for label, file in zip(prediction.labels, files, strict=True)]
accepted = [each for each, decision in zip(right, prediction.decision, strict=True) if decision == "accept"]
print(f"test images: {mean(right):.1%} have the right label")
print(f"{len(accepted) / len(right):.1%} are accepted, and {mean(accepted):.1%} of these have it")

for name in ("test", "other"):
    is_ood = psc.predict(sorted((images / name).glob("*/*"))).is_ood
    print(f"{name} images: {is_ood.float().mean():.1%} are called out of distribution")
