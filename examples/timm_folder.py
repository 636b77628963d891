"""A timm network and an ImageFolder: what you trained with is all that PSC.fit needs.

    python examples/timm_folder.py           (digits)
    python examples/timm_folder.py images    (images/train/CLASS/, val/CLASS/, test/CLASS/ and other/)

Prints the layer that PSC reads, and how many images of test/ and other/ get each decision.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import timm
import torch
from digits import digit_folders, train
from timm.data import create_transform, resolve_data_config
from torchvision.datasets import ImageFolder

from psc_core import PSC

images = Path(sys.argv[1]) if len(sys.argv) > 1 else digit_folders()
classes = sorted(path.name for path in (images / "train").iterdir())

# Yours: timm.create_model("resnet50", num_classes=len(classes), checkpoint_path="best.pth"), at its own size.
torch.manual_seed(0)
net = timm.create_model("test_resnet", num_classes=len(classes))
config = resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}, model=net)
transform = create_transform(**config)
train(net, ImageFolder(images / "train", transform))

# The configuration says the same for files, so that the model takes them and can be saved.
train_images, val_images = (ImageFolder(images / split, transform) for split in ("train", "val"))
psc = PSC.fit(net, train_images, val_images, classes=classes, preprocess=config)

print("reads", psc.layer)
for folder in ("test", "other"):
    prediction = psc.predict(sorted((images / folder).rglob("*.*")))
    print(folder, dict(Counter(prediction.decision)))
