"""Images of your own, in folders, and a network that a DataLoader trained on them.

    python examples/own_images.py          (with digits, written as files first)
    python examples/own_images.py images   (with train/CLASS/*.png, val/CLASS/*.png, test/CLASS/*.png, other/ANY/*.png)

Change PREPROCESS and the network below to yours.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean

import torch
from own_model import DATA, SmallNet
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from psc_core import PSC, Preprocess, fit_projection, fit_psc, measure_collapse, open_dataset

# How an image becomes an input: once for the DataLoader, once for PSC.  Both must be the same.
TRANSFORM = transforms.Compose(
    [
        transforms.Grayscale(),
        transforms.Resize((28, 28)),
        transforms.ToTensor(),
        transforms.Normalize(0.1307, 0.3081),
    ]
)
PREPROCESS = Preprocess("L", height=28, width=28, resize=None, mean=(0.1307,), std=(0.3081,))


def trained_network(images: Path) -> nn.Module:
    """The network as you have it already, trained by a loop of your own."""
    data = ImageFolder(str(images / "train"), TRANSFORM)
    torch.manual_seed(0)
    net = SmallNet(len(data.classes))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(6):
        for inputs, labels in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    return net.eval()


def fitted(net: nn.Module, images: Path) -> PSC:
    """Three steps over the folders: a layer, its projection, and what is fitted to it."""
    train = open_dataset(str(images / "train"), split="train", preprocess=PREPROCESS)
    val = open_dataset(str(images / "val"), split="val", preprocess=PREPROCESS)
    candidate = measure_collapse(net, train, val).candidate()
    projection = fit_projection(net, candidate, train, val)
    return fit_psc(net, candidate, projection, train, val)


def walk(psc: PSC, folder: Path) -> tuple[list[bool], list[str]]:
    """For every image of a folder, whether its label is right, and the decision; PSC prepares the images itself."""
    data = ImageFolder(str(folder))
    right: list[bool] = []
    decisions: list[str] = []
    for batch in DataLoader(data, batch_size=64, collate_fn=list):
        prediction = psc.predict([image for image, _ in batch])
        right += [said == data.classes[label] for (_, label), said in zip(batch, prediction.labels, strict=True)]
        decisions += prediction.decision
    return right, decisions


def main(images: Path) -> None:
    psc = fitted(trained_network(images), images)
    print(f"read at {psc.layer}; an image with a p-value of at most {psc.policy.alpha} is out of distribution")

    right, decisions = walk(psc, images / "test")
    accepted = [each for each, decision in zip(right, decisions, strict=True) if decision == "accept"]
    print(f"test images: {mean(right):.1%} have the right label")
    print(f"{len(accepted) / len(right):.1%} are accepted, and {mean(accepted):.1%} of these have it")

    _, others = walk(psc, images / "other")
    for name, each in (("test", decisions), ("other", others)):
        print(f"{name} images: {each.count('abstain_ood') / len(each):.1%} are called out of distribution")


def write_digits(images: Path) -> None:
    """Digits as PNG files, and clothes, which are none."""
    for folder, spec in (("train", "mnist"), ("val", "mnist"), ("test", "mnist"), ("other", "fashion-mnist")):
        split = "test" if folder == "other" else folder
        data = open_dataset(f"{spec}:{DATA}", split=split, preprocess=PREPROCESS)
        for index, label in enumerate(data.first_labels().tolist()):
            path = images / folder / data.classes[label].replace("/", "-") / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.image(index)[0]).save(path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_digits(Path(folder))
            main(Path(folder))
