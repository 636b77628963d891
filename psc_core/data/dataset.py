"""Labelled images, streamed in batches from arrays, encoded files in memory or files on disk.

A *labelled example* is one (image, label) pair.  An image may carry several labels (Dirty-MNIST gives each ambiguous
image ten); it is decoded and passed through the network only once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from psc_core.answers import Target
from psc_core.errors import DataError, ImageError, UsageError
from psc_core.images.files import read_file, sample_file
from psc_core.images.preprocess import Preprocess
from psc_core.text import class_names, compose

RawImage = npt.NDArray[np.uint8] | npt.NDArray[np.float32]  # one image (channels, height, width)


@runtime_checkable  # so that annotations can be checked at run time
class ImageSource(Protocol):
    """A store from which images are read one by one."""

    def __len__(self) -> int: ...

    def read(self, index: int, preprocess: Preprocess) -> RawImage:
        """Return image ``index`` in the size that ``preprocess`` gives."""

    def fingerprint(self, index: int) -> bytes:
        """Return bytes that identify the image in the store, for :meth:`psc_core.data.dataset.ImageDataset.digest`."""

    def modified_ns(self, index: int) -> int:
        """Return when the image was last changed, in nanoseconds since 1970; 0 if its content identifies it."""
        return 0


@dataclass(frozen=True)
class TensorSource(ImageSource):
    """Images of the network's size in one array (n, channels, height, width), ``float32`` inputs or ``uint8`` ones."""

    images: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int, preprocess: Preprocess) -> RawImage:
        if not self.fits(preprocess):
            raise DataError(
                f"expected images of shape {preprocess.shape}, these were given as {self.images.shape[1:]}; open them "
                "with a preprocess of that size"
            )
        image: RawImage = self.images[index]
        return image

    def fits(self, preprocess: Preprocess) -> bool:
        """Return whether ``preprocess`` leaves these images unchanged, so that they can be read all at once."""
        return self.images.shape[1:] == preprocess.shape

    def take(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return images as ``(n, channels, height, width)``; valid only if :meth:`fits`."""
        taken: npt.NDArray[Any] = self.images[indices]
        return taken

    def fingerprint(self, index: int) -> bytes:
        return bytes(self.images[index].data)


@dataclass(frozen=True)
class ArraySource(TensorSource):
    """Grey images in one ``uint8 (n, height, width)`` array, which may have any size."""

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        return preprocess.from_image(Image.fromarray(self.images[index]))

    def fits(self, preprocess: Preprocess) -> bool:
        return preprocess.resize is None and (1, *self.images.shape[1:]) == preprocess.shape

    def take(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return super().take(indices)[:, None]


@dataclass(frozen=True)
class EncodedSource(ImageSource):
    """Encoded image files in memory, each with a name for messages."""

    names: Sequence[str]
    files: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        with _naming(self.names[index]):
            return preprocess.from_bytes(self.files[index])

    def fingerprint(self, index: int) -> bytes:
        return self.files[index]


@dataclass(frozen=True)
class FileSource:
    """Encoded image files on disk, by size and path below ``root``; ``Path`` objects would take ten times as much."""

    root: Path
    names: npt.NDArray[Any]  # the paths, bytes (n,)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.names[index])

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        path = self.path(index)
        with _naming(path):
            return preprocess.from_bytes(read_file(path))

    def fingerprint(self, index: int) -> bytes:
        size, _ = self._size_and_time(index)
        return bytes(self.names[index]) + f"\0{size}\n".encode()

    def sample(self, index: int) -> bytes:
        """Return bytes that copies of the file have too; its name's where it cannot be read."""
        try:
            return sample_file(self.path(index))
        except (ImageError, OSError):
            return bytes(self.names[index])

    def size(self, index: int) -> int:
        """Return the size of the file, bytes; -1 where there is none."""
        return self._size_and_time(index)[0]

    def modified_ns(self, index: int) -> int:
        return self._size_and_time(index)[1]

    def _size_and_time(self, index: int) -> tuple[int, int]:
        """Return both as -1 where there is no file, at a dangling link; reading it fails, as of a damaged image."""
        try:
            status = self.path(index).stat()
        except OSError:
            return -1, -1
        return status.st_size, status.st_mtime_ns


@contextmanager
def _naming(image: str | Path) -> Iterator[None]:
    """Turn the errors of a block into :class:`DataError` that name the image."""
    try:
        yield
    except ImageError as error:
        raise DataError(f"{image}: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read the image {image}: {error.strerror}; repair or remove it") from error


DECODERS: Final = min(16, os.cpu_count() or 1)  # the number of threads that decode images


@dataclass(frozen=True)
class Batch:
    """A batch of images and labelled examples: example m is image ``image_index[m]`` with class ``labels[m]``."""

    images: Tensor  # (batch, channels, height, width), uint8 pixels or float32 inputs from a loader
    labels: Tensor  # int64 (examples,)
    image_index: Tensor  # int64 (examples,)
    values: Tensor | None = None  # float64 (batch,), the target's values; None for a classification

    def first_labels(self) -> Tensor:
        return self.labels[torch.searchsorted(self.image_index, torch.arange(len(self.images)))]

    def per_example(self, features: Tensor) -> Tensor:
        """Repeat the ``features`` (batch, …) of each image for its labelled examples, giving (examples, …)."""
        return features if len(self.image_index) == len(features) else features[self.image_index.to(features.device)]


@dataclass(frozen=True)
class ImageDataset:
    """n labelled images, read through one :class:`Preprocess`; :func:`label_images` creates one.

    For a regression each image has a number, and its label is the number's bin (:mod:`psc_core.tasks.regression`).

    Examples:
        >>> from psc_core import PRESETS, open_dataset
        >>> test = open_dataset("mnist:tests/data", split="test", preprocess=PRESETS["mnist"])
        >>> test.image(0).shape, next(test.batches(64)).images.shape
        ((1, 28, 28), torch.Size([64, 1, 28, 28]))
    """

    name: str  # for messages and reports
    classes: tuple[str, ...]  # class names; a label is an index into them
    source: ImageSource  # where the images are stored
    indices: Tensor  # int64 (n,) positions in source
    labels: Tensor  # int64 (examples,), the labels of all images in image order
    offsets: Tensor  # int64 (n + 1,); image i has labels[offsets[i]:offsets[i + 1]]
    preprocess: Preprocess
    groups: Mapping[str, Tensor] = field(default_factory=dict)  # subsets for reports, int64 positions in this data set
    target: Target | None = None  # regression only
    values: Tensor | None = None  # float64 (n,), the target's values, regression only
    notes: tuple[str, ...] = ()  # lines for the user on how it was read
    names_empty_classes: bool = True  # False for a table, which cannot name a class without images
    given: Tensor | None = None  # int64 (n,) where each image stood in the data that a fit was given

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "classes", class_names(self.classes))
        except UsageError as error:
            raise DataError(f"{self.name}: {error}") from error

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def examples(self) -> int:
        """The number of labelled examples."""
        return len(self.labels)

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """Return image ``index`` as a picture, ``uint8 (channels, height, width)``."""
        pixels: npt.NDArray[np.uint8] = self.preprocess.to_pixels(torch.tensor(self._read(index))[None])[0].numpy()
        return pixels

    def _read(self, index: int) -> RawImage:
        return self.source.read(int(self.indices[index]), self.preprocess)

    def first_labels(self) -> Tensor:
        """Return the first label of each image, ``int64 (n,)``."""
        return self.labels[self.offsets[:-1]]

    @property
    def is_ambiguous(self) -> bool:
        """True if an image has labels of several classes."""
        firsts = self.first_labels().repeat_interleave(self.offsets.diff())
        return bool((self.labels != firsts).any())

    def in_order(self, classes: Sequence[str]) -> ImageDataset:
        """Return the labels in the order of ``classes``; the data set itself if the class names differ."""
        classes = tuple(map(compose, classes))
        absent = {*classes} - {*self.classes}
        is_whole = len({*classes}) == len(classes) and {*self.classes} <= {*classes}
        if classes == self.classes or not is_whole or (absent and self.names_empty_classes):
            return self
        position = {name: label for label, name in enumerate(classes)}
        moved = torch.tensor([position[name] for name in self.classes])
        return replace(self, classes=classes, labels=moved[self.labels])

    def positions_given(self, positions: Tensor) -> Tensor:
        """Return where the images at ``positions`` stood before some were left out."""
        return positions if self.given is None else self.given[positions]

    def subset(self, positions: Tensor) -> ImageDataset:
        """Return the images at ``positions`` (``int64``), in that order, with their labels and groups."""
        labels, counts = self._labels_of(positions)
        offsets = functional.pad(counts.cumsum(0), (1, 0))
        where = torch.full((len(self),), -1, dtype=torch.int64)
        where[positions] = torch.arange(len(positions))
        groups = {name: kept[kept >= 0] for name, group in self.groups.items() for kept in [where[group]]}
        indices, values = self.indices[positions], self._values_of(positions)
        given = None if self.given is None else self.given[positions]
        return replace(self, indices=indices, labels=labels, offsets=offsets, groups=groups, values=values, given=given)

    def _labels_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels of the images at ``positions``, in that order, and the number of labels of each image."""
        counts = self.offsets[positions + 1] - self.offsets[positions]
        shift = (self.offsets[positions] - counts.cumsum(0) + counts).repeat_interleave(counts)
        return self.labels[shift.add_(torch.arange(len(shift)))], counts

    def _values_of(self, positions: Tensor) -> Tensor | None:
        return None if self.values is None else self.values[positions]

    def batches(self, batch_images: int, *, order: Tensor | None = None) -> Iterator[Batch]:
        """Yield the images, by default in ``order``, in batches that threads decode one batch ahead of the consumer."""
        order = torch.arange(len(self)) if order is None else order
        threads = ThreadPoolExecutor(DECODERS, "psc-decode")
        with threads as pool, ThreadPoolExecutor(1, "psc-collate") as collator:
            ahead: Future[Batch] | None = None
            for start in range(0, len(self), batch_images):
                following = collator.submit(self._collate, order[start : start + batch_images], pool)
                if ahead:
                    yield ahead.result()
                ahead = following
            if ahead:
                yield ahead.result()

    def _collate(self, positions: Tensor, pool: ThreadPoolExecutor) -> Batch:
        if isinstance(self.source, TensorSource) and self.source.fits(self.preprocess):
            images = torch.from_numpy(self.source.take(self.indices[positions].numpy()))
        else:
            images = torch.from_numpy(np.stack(list(pool.map(self._read, positions.tolist(), chunksize=16))))
        labels, counts = self._labels_of(positions)
        image_index = torch.arange(len(positions)).repeat_interleave(counts)
        return Batch(images, labels, image_index, self._values_of(positions))

    def digest(self) -> str:
        """Return the SHA-256 of the images' fingerprints and the labels or target values, for provenance."""
        labels: tuple[Tensor, ...] = (self.labels, self.offsets)
        named = "\0".join(self.classes)
        if self.values is not None:  # Without the bins, which a fit takes from its training images.
            labels, named = (self.values,), f"{self.target}\0"
        sha = hashlib.sha256(named.encode())
        for index in self.indices.numpy():
            sha.update(self.source.fingerprint(int(index)))
        for part in labels:
            sha.update(part.contiguous().numpy().data)
        return sha.hexdigest()


def label_images(
    name: str, classes: Sequence[str], source: ImageSource, labels: Tensor, preprocess: Preprocess
) -> ImageDataset:
    """Create a data set of the n images in ``source`` with class indices (n,), or (n, r) for r labels each."""
    count, each = len(labels), 1 if labels.ndim == 1 else labels.shape[1]
    if len(source) != count or count == 0:
        raise DataError(
            f"{name}: expected one label per image and at least one image, got {count} labels and {len(source)} images"
        )
    flat = labels.reshape(-1).to(torch.int64)
    check_labels(name, int(flat.min()), int(flat.max()), len(classes))
    return ImageDataset(
        name, tuple(classes), source, torch.arange(count), flat, torch.arange(count + 1) * each, preprocess
    )


def check_labels(name: str, low: int, high: int, classes: int) -> None:
    """Raise :class:`DataError` if the lowest or the highest label is none of this many classes."""
    if low < 0 or high >= classes:
        raise DataError(
            f"{name}: expected labels in 0…{classes - 1}, got {low}…{high}; leave out images of other classes, or name "
            "all of them"
        )


def concatenate(name: str, parts: Sequence[ImageDataset]) -> ImageDataset:
    """Join data sets of the same classes that are stored in arrays; each becomes a group."""
    first = parts[0]
    arrays = [part.source.images[part.indices.numpy()] for part in parts if isinstance(part.source, ArraySource)]
    if len(arrays) != len(parts):
        raise DataError(f"{name}: expected parts stored in arrays, got {[type(p.source).__name__ for p in parts]}")
    positions = torch.arange(sum(map(len, parts)))
    counts = torch.cat([part.offsets.diff() for part in parts])
    groups = zip([part.name for part in parts], torch.split(positions, [len(part) for part in parts]), strict=True)
    return ImageDataset(
        name,
        first.classes,
        ArraySource(np.concatenate(arrays)),
        positions,
        torch.cat([part.labels for part in parts]),
        functional.pad(counts.cumsum(0), (1, 0)),
        first.preprocess,
        dict(groups),
    )


def stable_order(labels: Tensor) -> Tensor:
    """Return ``int64 (n,)`` positions that sort ``labels`` stably; NumPy needs 4 bytes an entry, torch.sort 32."""
    return torch.from_numpy(np.argsort(labels.numpy(), kind="stable"))


def held_out(dataset: ImageDataset, split: str, every: int) -> ImageDataset:
    """Return a split: every ``every``-th training image is ``"val"``, the rest ``"train"``; ``"test"`` is unchanged."""
    if split == "test":
        return dataset
    position = torch.arange(len(dataset))
    is_val = position % every == every - 1
    return dataset.subset(position[is_val if split == "val" else ~is_val])


def draw(dataset: ImageDataset, count: int, seed: int = 0) -> ImageDataset:
    return dataset.subset(torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:count])


def draw_balanced(dataset: ImageDataset, count: int | None, seed: int = 0) -> ImageDataset:
    """Draw at most ``count`` images (None: all), equally many of each class if it has them, and keep their order."""
    if count is None or count >= len(dataset):
        return dataset
    return dataset.subset(balanced_positions(dataset, count, seed))


def balanced_positions(dataset: ImageDataset, count: int, seed: int = 0) -> Tensor:
    """Return the positions of the images that :func:`draw_balanced` draws, ``int64``, ascending."""
    firsts = dataset.first_labels()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    by_class = order[stable_order(firsts[order])]
    sizes = torch.bincount(firsts, minlength=len(dataset.classes))
    turn = torch.cat([torch.arange(int(size)) for size in sizes])  # an image's rank within its class
    chosen = by_class[stable_order(turn)[:count]]
    return chosen.sort().values


def split_validation(val: ImageDataset, seed: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Split the validation images at random into two halves: the selection split and the calibration split.

    The selection split selects layer, ranks, prior precision and temperature.  The calibration split gives p-values,
    thresholds and prediction sets; nothing was selected on it, so the nominal rates hold.
    """
    if len(val) < 2:
        raise DataError(f"{val.name}: expected at least two validation images, got {len(val)}; add images")
    order = torch.randperm(len(val), generator=torch.Generator().manual_seed(seed))
    half = len(val) // 2
    return val.subset(order[:half].sort().values), val.subset(order[half:].sort().values)


def known_values(values: Tensor | None) -> Tensor:
    """Return the target values of images; raise :class:`DataError` if the images have classes instead."""
    if values is None:
        raise DataError("expected images with numbers, got images with classes; give images for the model's task")
    return values


def number_images(
    name: str, target: Target, source: ImageSource, values: Float[Tensor, " n"], preprocess: Preprocess
) -> ImageDataset:
    """Create a data set of the n images in ``source`` with target ``values``, all in one bin."""
    count = len(values)
    if len(source) != count or count == 0:
        raise DataError(
            f"{name}: expected one {target.name} per image and at least one image, got {count} and {len(source)} images"
        )
    odd = (~values.isfinite()).nonzero()[:, 0].tolist()
    if odd:
        raise DataError(
            f"{name}: expected finite numbers of {target.name}, got {len(odd)} that are not, the first of "
            f"image {odd[0]}, counted from 0; leave them out"
        )
    labels, offsets = torch.zeros(count, dtype=torch.int64), torch.arange(count + 1)
    return ImageDataset(
        name, (target.name,), source, torch.arange(count), labels, offsets, preprocess,
        target=target, values=values.double(),
    )  # fmt: skip
