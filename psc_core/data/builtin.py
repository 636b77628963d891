"""Data sets by name: MNIST and its relatives as IDX files, CIFAR-10 as a tar archive of JPEGs.

The validation split of each is held out of its training images at fixed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from psc_core.data.dataset import ImageDataset, concatenate, labelled
from psc_core.data.formats import read_idx, read_tar
from psc_core.data.sources import ArraySource, EncodedSource
from psc_core.data.splits import held_out
from psc_core.images.preprocess import Preprocess

_DIGITS = tuple("0123456789")


_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def _idx_pair(root: Path, folder: str, split: str) -> tuple[ArraySource, Tensor]:
    stem = root / folder / "raw" / ("t10k" if split == "test" else "train")
    images = read_idx(Path(f"{stem}-images-idx3-ubyte"), ndim=3)
    label_file = f"{stem}-labels-idx{2 if folder == 'AmbiguousMNIST' else 1}-ubyte"
    return ArraySource(images), torch.from_numpy(read_idx(Path(label_file)).astype(np.int64))


def mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    whole = labelled("mnist", _DIGITS, *_idx_pair(root, "MNIST", split), preprocess)
    return whole if split == "test" else held_out(whole, split, every=12)


def fashion_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    whole = labelled("fashion-mnist", _FASHION, *_idx_pair(root, "FashionMNIST", split), preprocess)
    return whole if split == "test" else held_out(whole, split, every=12)


def ambiguous_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    source, labels = _idx_pair(root, "AmbiguousMNIST", split)
    whole = labelled("ambiguous-mnist", _DIGITS, source, labels if split == "train" else labels[:, 0], preprocess)
    return whole if split == "test" else held_out(whole, split, every=2)


def dirty_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """MNIST and Ambiguous-MNIST; validation takes 5,000 and 3,000 images, the proportion of the test sets.

    In training an ambiguous image has ten labels; in validation and test it has one, the first.
    """
    return concatenate("dirty-mnist", [mnist(root, split, preprocess), ambiguous_mnist(root, split, preprocess)])


def cifar10(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    names, files = read_tar(root / "cifar10-jpeg.tar.gz", f"cifar10/{'test' if split == 'test' else 'train'}/")
    classes = sorted({name.split("/")[-2] for name in names})
    labels = torch.tensor([classes.index(name.split("/")[-2]) for name in names])
    whole = labelled("cifar10", classes, EncodedSource(names, files), labels, preprocess)
    return whole if split == "test" else held_out(whole, split, every=10)


BUILT_IN: Mapping[str, Callable[[Path, str, Preprocess], ImageDataset]] = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "ambiguous-mnist": ambiguous_mnist,
    "dirty-mnist": dirty_mnist,
    "cifar10": cifar10,
}
"""Readers by name, the part of a spec before the colon."""
