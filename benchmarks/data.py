"""Data sets derived from the built-in ones, with some classes held out as out-of-distribution.

``psc-fit --train benchmarks.data:cifar10_known_0 …`` with ``PSC_DATA`` naming the folder of the data sets.  For each
split, ``…_known_N`` has the classes that a network is trained on and ``…_unknown_N`` the others (near OOD).  The
CIFAR-10 splits are those of the open-set literature (Neal et al., 2018; Vaze et al., 2022) in the published order; the
splits of the digits use the same class numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.errors import DataError
from psc_core.images.preprocess import Preprocess

KNOWN_CLASSES = (  # The six known classes of each split.
    (0, 1, 2, 4, 5, 9),
    (0, 3, 5, 7, 8, 9),
    (0, 1, 5, 6, 7, 8),
    (3, 4, 5, 7, 8, 9),
    (0, 1, 2, 3, 7, 8),
)

ROOT_VARIABLE = "PSC_DATA"  # The environment variable with the folder of the data sets.

Factory = Callable[..., ImageDataset]


def data_root() -> Path:
    if ROOT_VARIABLE not in os.environ:
        raise DataError(f"{ROOT_VARIABLE} is not set; export it as the folder of the data sets")
    return Path(os.environ[ROOT_VARIABLE])


def keep_classes(dataset: ImageDataset, classes: Sequence[int], name: str) -> ImageDataset:
    """Return the images of some classes, renumbered 0, 1, … in the given order."""
    new = torch.full((len(dataset.classes),), -1)
    new[torch.tensor(classes)] = torch.arange(len(classes))
    kept = dataset.subset((new[dataset.first_labels()] >= 0).nonzero().squeeze(1))
    return replace(kept, name=name, classes=tuple(dataset.classes[c] for c in classes), labels=new[kept.labels])


def random_images(dataset: ImageDataset, count: int | None, seed: int = 0) -> ImageDataset:
    """Return at most ``count`` random images in their original order; all for ``None``."""
    if count is None or count >= len(dataset):
        return dataset
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return dataset.subset(order[:count].sort().values)


def _factory(source: str, split_number: int, *, known: bool) -> Factory:
    inside = KNOWN_CLASSES[split_number]
    classes = inside if known else tuple(c for c in range(10) if c not in inside)
    name = f"{source}-{'known' if known else 'unknown'}-{split_number}"

    def factory(*, split: str, preprocess: Preprocess) -> ImageDataset:
        whole = open_dataset(f"{source}:{data_root()}", split=split, preprocess=preprocess)
        return keep_classes(whole, classes, name)

    return factory


def cifar10_few_5000(*, split: str, preprocess: Preprocess) -> ImageDataset:
    """Return CIFAR-10 with so few training images that a network soon memorises them."""
    whole = open_dataset(f"cifar10:{data_root()}", split=split, preprocess=preprocess)
    return replace(random_images(whole, 5000), name="cifar10-few-5000") if split == "train" else whole


def cifar10_few_0(*, split: str, preprocess: Preprocess) -> ImageDataset:
    """Return the known classes of CIFAR-10's split 0 with 3,000 training images."""
    known = cifar10_known_0(split=split, preprocess=preprocess)
    return replace(random_images(known, 3000), name="cifar10-few-0") if split == "train" else known


cifar10_known_0, cifar10_unknown_0 = (_factory("cifar10", 0, known=known) for known in (True, False))
cifar10_known_1, cifar10_unknown_1 = (_factory("cifar10", 1, known=known) for known in (True, False))
cifar10_known_2, cifar10_unknown_2 = (_factory("cifar10", 2, known=known) for known in (True, False))
cifar10_known_3, cifar10_unknown_3 = (_factory("cifar10", 3, known=known) for known in (True, False))
cifar10_known_4, cifar10_unknown_4 = (_factory("cifar10", 4, known=known) for known in (True, False))
mnist_known_0, mnist_unknown_0 = (_factory("mnist", 0, known=known) for known in (True, False))
mnist_known_1, mnist_unknown_1 = (_factory("mnist", 1, known=known) for known in (True, False))
