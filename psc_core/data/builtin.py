"""The named data sets: MNIST and its relatives as IDX files, CIFAR-10 as a tar archive of JPEGs, and rotated digits.

The validation split of each consists of training images at fixed positions.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from psc_core.data.dataset import ImageDataset, concatenate, held_out, labelled
from psc_core.data.sources import ArraySource, EncodedSource
from psc_core.data.targets import measured
from psc_core.errors import DataError
from psc_core.images.preprocess import Preprocess
from psc_core.target import Target

SEEDS = (0, 1)
"""Seeds for the angles of rotated-mnist's training and test images."""

LARGEST_ANGLE = 60.0
"""Largest rotation of the digits of rotated-mnist in either direction, in degrees."""

_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def read_idx(path: Path, *, ndim: int | None = None) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or compressed (with ``.gz`` after its name).

    The header is two zero bytes, the type code, the number of axes, and the length of each axis as big-endian uint32.

    Raises:
        DataError: If the file is missing, has another type, or its length does not match the header.
    """
    packed = path.with_name(path.name + ".gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the IDX file {packed} or {path}: {error}") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: expected an IDX header of unsigned bytes, got {data[:4]!r}")
    axes = data[3]
    if not 1 <= axes <= len(data) // 4 - 1:
        raise DataError(f"{path}: expected the length of each of {axes} axes, got {len(data)} bytes")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", count=axes, offset=4))
    if (ndim is not None and axes != ndim) or len(data) != 4 + 4 * axes + math.prod(shape):
        raise DataError(
            f"{path}: expected {ndim or axes} axes and {shape} bytes, got {axes} axes and "
            f"{len(data) - 4 - 4 * axes} bytes"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def read_tar(path: Path, prefix: str) -> dict[str, bytes]:
    """Read the files below ``prefix`` in a tar archive into memory, and return their contents by name, sorted.

    Raises:
        DataError: If the file is not a tar archive, or has no files below ``prefix``.
    """
    try:
        with tarfile.open(path) as tar:
            members = sorted((m for m in tar if m.isfile() and m.name.startswith(prefix)), key=lambda m: m.name)
            files = {member.name: file.read() for member in members if (file := tar.extractfile(member))}
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the tar archive {path}: {error}") from error
    if not files:
        raise DataError(f"{path} has no files below {prefix}; give the whole archive")
    return files


def _idx_pair(root: Path, folder: str, split: str) -> tuple[ArraySource, Tensor]:
    stem = root / folder / "raw" / ("t10k" if split == "test" else "train")
    images = read_idx(Path(f"{stem}-images-idx3-ubyte"), ndim=3)
    label_file = f"{stem}-labels-idx{2 if folder == 'AmbiguousMNIST' else 1}-ubyte"
    return ArraySource(images), torch.from_numpy(read_idx(Path(label_file)).astype(np.int64))


def mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    return held_out(labelled("mnist", _DIGITS, *_idx_pair(root, "MNIST", split), preprocess), split, every=12)


def fashion_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    whole = labelled("fashion-mnist", _FASHION, *_idx_pair(root, "FashionMNIST", split), preprocess)
    return held_out(whole, split, every=12)


def ambiguous_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    source, labels = _idx_pair(root, "AmbiguousMNIST", split)
    labels = labels if split == "train" else labels[:, 0]
    return held_out(labelled("ambiguous-mnist", _DIGITS, source, labels, preprocess), split, every=2)


def dirty_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Join MNIST and Ambiguous-MNIST; validation takes 5,000 and 3,000 images, the proportion of the test sets.

    In training an ambiguous image has ten labels; in validation and test it has one, the first.
    """
    return concatenate("dirty-mnist", [mnist(root, split, preprocess), ambiguous_mnist(root, split, preprocess)])


def cifar10(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    files = read_tar(root / "cifar10-jpeg.tar.gz", f"cifar10/{'test' if split == 'test' else 'train'}/")
    folders = [name.split("/")[-2] for name in files]
    classes = sorted(set(folders))
    source = EncodedSource(list(files), list(files.values()))
    labels = torch.tensor([classes.index(folder) for folder in folders])
    return held_out(labelled("cifar10", classes, source, labels, preprocess), split, every=10)


def rotated_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Rotate each digit by a random angle up to :data:`LARGEST_ANGLE`, its target; the same on every call."""
    source, _ = _idx_pair(root, "MNIST", split)
    generator = torch.Generator().manual_seed(SEEDS[split == "test"])
    angles = (2 * torch.rand(len(source), generator=generator, dtype=torch.float64) - 1) * LARGEST_ANGLE
    turned = [
        np.asarray(Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR))
        for image, angle in zip(source.images, angles.tolist(), strict=True)
    ]
    target = Target(name="angle", unit="degrees")
    return held_out(
        measured("rotated-mnist", target, ArraySource(np.stack(turned)), angles, preprocess), split, every=12
    )


BUILT_IN: Mapping[str, Callable[[Path, str, Preprocess], ImageDataset]] = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "ambiguous-mnist": ambiguous_mnist,
    "dirty-mnist": dirty_mnist,
    "cifar10": cifar10,
    "rotated-mnist": rotated_mnist,
}
"""The function that opens each data set, by the part of a spec before the colon."""
