"""Labelled images as one streaming interface, whatever they are stored in.

A data set is named by a *spec*:

* ``DIR``: the ImageFolder layout, ``class/file.png``;
* ``mnist:ROOT``, ``fashion-mnist:ROOT``, ``ambiguous-mnist:ROOT``, ``dirty-mnist:ROOT``, ``cifar10:ROOT``:
  built-in readers of the IDX files or of the CIFAR-10 archive of JPEGs below ``ROOT``;
* ``package.module:factory``: a function ``factory(split=…, preprocess=…) -> ImageDataset``.

``#train``, ``#val`` or ``#test`` behind a built-in spec picks the split by hand; else the caller's role does.
The validation split of a built-in set is held out of its training images at fixed positions.

Labels: an image may carry several (Dirty-MNIST gives each ambiguous image ten).  Each (image, label) pair is
one *row* of training data; the image itself is decoded and sent through the network once.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from psc_core.data import formats as idx
from psc_core.data.sources import ArraySource, EncodedSource, FileSource, ImageSource
from psc_core.errors import DataError
from psc_core.images.preprocess import Preprocess

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""File names an ImageFolder directory is searched for."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Batch:
    """Some images and the rows they stand for.

    Attributes:
        images: ``uint8 (batch, channels, height, width)``.
        labels: ``int64 (rows,)`` class indices.
        image_index: ``int64 (rows,)``; row m is image ``image_index[m]`` with label ``labels[m]``.
    """

    images: Tensor
    labels: Tensor
    image_index: Tensor

    def per_example(self, features: Tensor) -> Tensor:
        """Repeat per-image ``features`` (batch, …) to one entry a row (rows, …)."""
        return features if len(self.image_index) == len(features) else features[self.image_index.to(features.device)]


@dataclass(frozen=True)
class ImageDataset:
    """Images with labels, read through one :class:`Preprocess`.

    Attributes:
        name: How messages and reports call it.
        classes: Class names; a label is an index into it.
        source: Where the images are.
        indices: ``int64 (n,)`` positions in ``source``.
        labels: ``int64 (rows,)`` labels of all images, image after image.
        offsets: ``int64 (n + 1,)``; image i has ``labels[offsets[i]:offsets[i + 1]]``.
        preprocess: Host and device preprocessing.
        groups: Named parts for reports, as ``int64`` positions in this data set.
    """

    name: str
    classes: tuple[str, ...]
    source: ImageSource
    indices: Tensor
    labels: Tensor
    offsets: Tensor
    preprocess: Preprocess
    groups: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def examples(self) -> int:
        """Number of (image, label) pairs."""
        return len(self.labels)

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """Image ``index`` as ``uint8 (channels, height, width)``."""
        return self.source.read(int(self.indices[index]), self.preprocess)

    def first_labels(self) -> Tensor:
        """One label an image, ``int64 (n,)``."""
        return self.labels[self.offsets[:-1]]

    def subset(self, positions: Tensor) -> ImageDataset:
        """The images at ``positions`` (``int64``), in that order; groups are kept where they overlap."""
        labels, counts = self._labels_of(positions)
        offsets = functional.pad(counts.cumsum(0), (1, 0))
        groups: dict[str, Tensor] = {}
        if self.groups:
            where = torch.full((len(self),), -1, dtype=torch.int64)
            where[positions] = torch.arange(len(positions))
            groups = {name: kept[kept >= 0] for name, group in self.groups.items() for kept in [where[group]]}
        return replace(self, indices=self.indices[positions], labels=labels, offsets=offsets, groups=groups)

    def _labels_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of the images at ``positions``, image after image, and how many each of them has."""
        counts = self.offsets[positions + 1] - self.offsets[positions]
        shift = (self.offsets[positions] - counts.cumsum(0) + counts).repeat_interleave(counts)
        return self.labels[shift.add_(torch.arange(len(shift)))], counts

    def batches(self, batch_images: int, *, order: Tensor | None = None, workers: int | None = None) -> Iterator[Batch]:
        """Stream ``batch_images`` images a batch, fewer in the last.

        Decoding runs in ``workers`` threads, one batch ahead of the consumer.

        Args:
            batch_images: Images a batch.
            order: ``int64 (n,)``, a permutation of the positions in this data set; as they are by default.
            workers: Threads that decode.

        Raises:
            DataError: An image cannot be read; the message names it.
        """
        threads = ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1), "psc-decode")
        with threads as pool, ThreadPoolExecutor(1, "psc-collate") as collator:
            ahead: Future[Batch] | None = None
            for start in range(0, len(self), batch_images):
                batch = ahead.result() if ahead else self._collate(start, batch_images, order, pool)
                following = start + batch_images
                more = following < len(self)
                ahead = collator.submit(self._collate, following, batch_images, order, pool) if more else None
                yield batch

    def batch_count(self, batch_images: int) -> int:
        """How many batches :meth:`batches` yields."""
        return -(-len(self) // batch_images)

    def _collate(self, start: int, count: int, order: Tensor | None, pool: ThreadPoolExecutor) -> Batch:
        stop = min(start + count, len(self))
        positions = torch.arange(start, stop) if order is None else order[start:stop]
        if isinstance(self.source, ArraySource) and self.source.fits(self.preprocess):
            images = torch.from_numpy(self.source.images[self.indices[positions].numpy()][:, None])
        else:
            images = torch.from_numpy(np.stack(list(pool.map(self.image, positions.tolist(), chunksize=16))))
        labels, counts = self._labels_of(positions)
        return Batch(images, labels, torch.arange(len(positions)).repeat_interleave(counts))

    def digest(self) -> str:
        """SHA-256 over the stored images' fingerprints and the labels, for provenance."""
        sha = hashlib.sha256("\0".join(self.classes).encode())
        for index in self.indices.numpy():
            sha.update(self.source.fingerprint(int(index)))
        sha.update(self.labels.contiguous().numpy().data)
        sha.update(self.offsets.contiguous().numpy().data)
        return sha.hexdigest()


def labelled(
    name: str, classes: Sequence[str], source: ImageSource, labels: Tensor, preprocess: Preprocess
) -> ImageDataset:
    """A data set from ``labels``: ``int64 (n,)``, or ``(n, r)`` for r labels an image."""
    count, each = len(labels), 1 if labels.ndim == 1 else labels.shape[1]
    if len(source) != count or count == 0:
        raise DataError(
            f"{name}: expected as many labels as images and at least one, got {count} labels and {len(source)} images"
        )
    flat = labels.reshape(-1).to(torch.int64)
    if int(flat.min()) < 0 or int(flat.max()) >= len(classes):
        raise DataError(f"{name}: expected labels in 0…{len(classes) - 1}, got {int(flat.min())}…{int(flat.max())}")
    return ImageDataset(
        name, tuple(classes), source, torch.arange(count), flat, torch.arange(count + 1) * each, preprocess
    )


def concatenate(name: str, parts: Sequence[ImageDataset]) -> ImageDataset:
    """Data sets of the same classes and array sources one after the other, each part a group."""
    first = parts[0]
    arrays = [part.source.images[part.indices.numpy()] for part in parts if isinstance(part.source, ArraySource)]
    if len(arrays) != len(parts):
        raise DataError(f"{name}: expected array sources to join, got {[type(p.source).__name__ for p in parts]}")
    starts = np.cumsum([0, *(len(part) for part in parts)])
    counts = torch.cat([part.offsets[1:] - part.offsets[:-1] for part in parts])
    return ImageDataset(
        name,
        first.classes,
        ArraySource(np.concatenate(arrays)),
        torch.arange(int(starts[-1])),
        torch.cat([part.labels for part in parts]),
        torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        first.preprocess,
        {part.name: torch.arange(int(a), int(b)) for part, a, b in zip(parts, starts, starts[1:], strict=False)},
    )


def open_dataset(spec: str, *, split: str, preprocess: Preprocess, labelled_images: bool = True) -> ImageDataset:
    """Open the data set that ``spec`` names (see the module docstring).

    Args:
        spec: Directory, built-in name with root, or factory; an optional ``#split`` wins over ``split``.
        split: ``"train"``, ``"val"`` or ``"test"``; a directory is taken whole whatever the split, but only for
            ``"train"`` must each of its class folders hold images.
        preprocess: How its images are read.
        labelled_images: When false, a directory is one class: every image below it (out-of-distribution sets).

    Raises:
        DataError: The spec, the directory or its layout is not usable; the message says what was expected.
    """
    body, mark, chosen = spec.rpartition("#")
    if not mark or Path(spec).is_dir():
        body, chosen = spec, ""
    split = chosen or split
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)} behind '#', got {split!r} in {spec!r}")
    kind, separator, rest = body.partition(":")
    if separator and kind in BUILT_IN:
        return BUILT_IN[kind](Path(rest), split, preprocess)
    if separator and "/" not in kind and not Path(body).exists():
        return _from_factory(kind, rest, split, preprocess)
    return image_folder(Path(body), preprocess, labelled_images=labelled_images, empty_classes=split != "train")


def by_class(dataset: ImageDataset) -> Tensor:
    """``int64 (n,)`` positions of the images, those of one class (their first label) after another."""
    return stable_order(dataset.first_labels())


def stable_order(labels: Tensor) -> Tensor:
    """``int64 (n,)`` positions that sort ``labels``, with 4 bytes an entry beside them (torch's sort takes 32)."""
    return torch.from_numpy(np.argsort(labels.numpy(), kind="stable"))


def split_validation(val: ImageDataset, seed: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Two random halves of the validation images: one chooses, the other only calibrates.

    Layer, ranks, prior precision and temperature are chosen on the first; p-values, thresholds and prediction sets come
    from the second, which nothing was chosen on, so their stated rates hold.

    Raises:
        DataError: Fewer than two images.
    """
    if len(val) < 2:
        raise DataError(f"{val.name}: expected at least two validation images to split, got {len(val)}")
    order = torch.randperm(len(val), generator=torch.Generator().manual_seed(seed))
    half = len(val) // 2
    return val.subset(order[:half].sort().values), val.subset(order[half:].sort().values)


def _from_factory(module: str, name: str, split: str, preprocess: Preprocess) -> ImageDataset:
    if not module or module.startswith("."):
        raise DataError(f"expected package.module:factory, not a path, got {module}:{name}")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"expected a directory, one of {', '.join(f'{k}:ROOT' for k in BUILT_IN)}, or "
            f"package.module:factory; {module}:{name} cannot be imported ({error})"
        ) from error
    dataset = factory(split=split, preprocess=preprocess)
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"expected {module}:{name} to return an ImageDataset, got {type(dataset).__name__}")
    return dataset


def image_folder(
    root: Path, preprocess: Preprocess, *, labelled_images: bool = True, empty_classes: bool = False
) -> ImageDataset:
    """The ImageFolder layout: one directory a class, sorted by name; without labels, every image below ``root``.

    With ``empty_classes`` the folder of a class may be empty, as where a test set has no image of it.
    """
    if not root.is_dir():
        raise DataError(f"expected a directory of images, {root} is not one")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir()) if labelled_images else [root]
    if not folders:
        raise DataError(f"expected one folder a class in {root}, it has none; lay images out as class/file.png")
    names: list[npt.NDArray[Any]] = []
    for label, folder in enumerate(folders):
        if labelled_images and folder.name.encode(errors="replace").decode() != folder.name:
            raise DataError(f"expected class folders named in UTF-8, {root} has {folder.name!r}; rename it")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files and not empty_classes:
            raise DataError(
                f"class folder {label + 1} of {len(folders)}, {folder}, has no images "
                f"({', '.join(SUFFIXES)}); add some or remove the folder"
            )
        names.append(np.array([os.fsencode(path.relative_to(root)) for path in files], dtype=np.bytes_))
    if not any(map(len, names)):
        raise DataError(f"expected images ({', '.join(SUFFIXES)}) in {root}, it has none; add some")
    labels = torch.arange(len(folders)).repeat_interleave(torch.tensor([len(files) for files in names]))
    source = FileSource(root, np.concatenate(names))
    return labelled(str(root), [folder.name for folder in folders], source, labels, preprocess)


def _held_out(dataset: ImageDataset, split: str, every: int) -> ImageDataset:
    """Every ``every``-th training image is for validation."""
    position = torch.arange(len(dataset))
    is_val = position % every == every - 1
    return dataset.subset(position[is_val if split == "val" else ~is_val])


_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def _idx_pair(root: Path, folder: str, split: str) -> tuple[ArraySource, Tensor]:
    stem = root / folder / "raw" / ("t10k" if split == "test" else "train")
    images = idx.read(Path(f"{stem}-images-idx3-ubyte"), ndim=3)
    label_file = f"{stem}-labels-idx{2 if folder == 'AmbiguousMNIST' else 1}-ubyte"
    return ArraySource(images), torch.from_numpy(idx.read(Path(label_file)).astype(np.int64))


def _mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    whole = labelled("mnist", _DIGITS, *_idx_pair(root, "MNIST", split), preprocess)
    return whole if split == "test" else _held_out(whole, split, every=12)


def _fashion_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    whole = labelled("fashion-mnist", _FASHION, *_idx_pair(root, "FashionMNIST", split), preprocess)
    return whole if split == "test" else _held_out(whole, split, every=12)


def _ambiguous_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    source, labels = _idx_pair(root, "AmbiguousMNIST", split)
    whole = labelled("ambiguous-mnist", _DIGITS, source, labels if split == "train" else labels[:, 0], preprocess)
    return whole if split == "test" else _held_out(whole, split, every=2)


def _dirty_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """MNIST and Ambiguous-MNIST; validation holds 5,000 and 3,000 images, the test sets' own proportion.

    For training an ambiguous image is ten rows, one a label; elsewhere it counts once, with its first label.
    """
    return concatenate("dirty-mnist", [_mnist(root, split, preprocess), _ambiguous_mnist(root, split, preprocess)])


def _cifar10(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    names, files = idx.read_tar(root / "cifar10-jpeg.tar.gz", f"cifar10/{'test' if split == 'test' else 'train'}/")
    classes = sorted({name.split("/")[-2] for name in names})
    labels = torch.tensor([classes.index(name.split("/")[-2]) for name in names])
    whole = labelled("cifar10", classes, EncodedSource(names, files), labels, preprocess)
    return whole if split == "test" else _held_out(whole, split, every=10)


BUILT_IN: Mapping[str, Callable[[Path, str, Preprocess], ImageDataset]] = {
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "ambiguous-mnist": _ambiguous_mnist,
    "dirty-mnist": _dirty_mnist,
    "cifar10": _cifar10,
}
"""Readers by the name in front of the colon."""
