"""What a fit finds out about its images once: their pixels, kept on disk, those it cannot decode, those it has twice.

Images that cannot be decoded are found before anything is computed, so that a few of them do not end a fit.  If pixels
are kept, this pass is the one that decodes them, at no extra cost.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from psc_core.compute import Compute, track
from psc_core.data.dataset import DECODERS, FileSource, ImageDataset, ImageSource, RawImage, TensorSource
from psc_core.errors import DataError, ImageError, LoaderWarning, UsageError, warn
from psc_core.images.decode import open_image
from psc_core.images.files import read_file
from psc_core.images.preprocess import Preprocess

FREE_FRACTION: Final = 0.5  # fraction of the free disk space that the scratch files may take


@dataclass(frozen=True)
class CachedSource:
    """Images of another source, decoded when they are first read; thread-safe."""

    origin: ImageSource
    indices: npt.NDArray[np.int64]  # (n,) positions in the origin
    preprocess: Preprocess  # that made the pixels
    pixels: npt.NDArray[np.uint8]  # (n, channels, height, width); valid where is_decoded
    is_decoded: npt.NDArray[np.bool_]  # (n,)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, preprocess: Preprocess) -> RawImage:
        if preprocess != self.preprocess:
            return self.origin.read(int(self.indices[index]), preprocess)
        if not self.is_decoded[index]:
            self.pixels[index] = self.origin.read(int(self.indices[index]), preprocess)
            self.is_decoded[index] = True
        image: npt.NDArray[np.uint8] = self.pixels[index]
        return image

    def fingerprint(self, index: int) -> bytes:
        return self.origin.fingerprint(int(self.indices[index]))

    def modified_ns(self, index: int) -> int:
        return self.origin.modified_ns(int(self.indices[index]))


@dataclass
class Scratch:
    """A folder where each process of a fit keeps what need not fit into memory, in files without a name.

    Nothing is left of them however the process ends.  Their space is reserved before they are mapped, because otherwise
    a full disk would kill the process at a write to memory.
    """

    folder: Path | None = None  # None for the system's
    processes: int = 1  # that keep files at the same time
    array_bytes: int = 0  # of all arrays so far

    def open(self) -> IO[bytes]:
        """Create a file to append to, which :func:`map_file` maps later; an OSError if there is no such folder."""
        return tempfile.TemporaryFile(dir=self.folder, prefix="psc-", buffering=0)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Create an array of zeros, which outlives the file object; an OSError if there is no room."""
        with self.open() as file:
            array = map_file(file, shape, dtype)
        self.array_bytes += array.nbytes
        return array

    def room(self) -> int:
        """Return the bytes that may be used; an OSError if there is no such folder."""
        return int(FREE_FRACTION * shutil.disk_usage(self.folder or tempfile.gettempdir()).free)

    def size(self, *datasets: ImageDataset) -> int:
        """Return the bytes that the pixels of these data sets take, those of all processes together."""
        return self.processes * sum(map(pixel_bytes, datasets))

    def has_room(self, *datasets: ImageDataset) -> bool:
        """Return whether the pixels of these data sets leave enough of the free disk space."""
        try:
            return self.size(*datasets) <= self.room()
        except OSError as error:
            if self.folder is None:
                return False
            raise _unusable(self.folder, error) from error

    def notes(self, *datasets: ImageDataset) -> tuple[str, ...]:
        """Return a line of text about those data sets whose images are not kept, if there are any."""
        if not (size := self.size(*datasets)):
            return ()
        room = f"no room on the disk for {math.ceil(size / (1 << 20)):,} MiB of decoded images"
        return (f"{room}, so each pass decodes them again; --cache DIR chooses another disk",)


def map_file(file: IO[bytes], shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the content of a file as an array, with zeros for what it lacks."""
    size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    os.posix_fallocate(file.fileno(), 0, size)
    return np.frombuffer(mmap.mmap(file.fileno(), size), dtype, math.prod(shape)).reshape(shape)


def pixel_bytes(dataset: ImageDataset) -> int:
    """Return the bytes that the pixels of a data set take in a cache; 0 where its images need no decoding."""
    match dataset.source:
        case TensorSource() as source if source.fits(dataset.preprocess):
            return 0
        case CachedSource(preprocess=dataset.preprocess):
            return 0
    return len(dataset) * math.prod(dataset.preprocess.shape)


def cache_images(dataset: ImageDataset, folder: Path | None = None) -> ImageDataset:
    """Return ``dataset`` with its pixels kept, or unchanged if they need no decoding or the system's disk is full."""
    if not pixel_bytes(dataset):
        return dataset
    try:
        pixels = Scratch(folder).array((len(dataset), *dataset.preprocess.shape), np.uint8)
    except OSError as error:
        if folder is None:
            return dataset
        raise _unusable(folder, error) from error
    is_decoded = np.zeros(len(dataset), np.bool_)
    kept = CachedSource(dataset.source, dataset.indices.numpy(), dataset.preprocess, pixels, is_decoded)
    return replace(dataset, source=kept, indices=torch.arange(len(dataset)))


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot store pixels in {folder}: {error.strerror}; choose another --cache or off")


REPEATED: Final = 0.01  # fraction of the validation images that may be duplicates: real data sets have a few
HOLD_OUT: Final = "calibration on training images does not hold for new ones, so hold some images out"
COMPARED_VALUES: Final = 4096  # maximum number of values that the key of an image in an array is made of


def shared_images(train: ImageDataset, val: ImageDataset, show: Callable[[Sequence[int]], Iterable[int]] = iter) -> int:
    """Return how many images of ``val`` are in ``train``, copies of files too; ``show`` shows how many are done."""
    sizes = {_file_size(val, position) for position in range(len(val))}
    keys = [*image_keys(val)]
    contents: dict[bytes, set[bytes | None]] = {key: set() for key in keys}
    for position in show(range(len(train))):
        # A file is opened only where a validation image has its size: on a network that takes most of the time.
        if _file_size(train, position) in sizes and (key := _key(train, position)) in contents:
            contents[key].add(_content(train, position))
    unreadable = {None}
    # Different images may have one key: of bitmaps with the same background nearly all do.
    return sum(
        bool(of_train := contents[key] - unreadable) and _content(val, position) in of_train
        for position, key in enumerate(keys)
    )


def check_disjoint(
    train: ImageDataset, val: ImageDataset, show: Callable[[Sequence[int]], Iterable[int]] = iter
) -> None:
    """Require validation images that are not training images, but for a few duplicates, and warn if they repeat."""
    shared = shared_images(train, val, show)
    if shared > REPEATED * len(val):
        raise UsageError(
            f"expected validation images that the network was not trained on, {shared} of the {len(val)} images of "
            f"{val.name} are training images too; {HOLD_OUT}"
        )
    warn_of_repeated(val)


def warn_of_repeated(val: ImageDataset) -> None:
    """Warn if validation images repeat: drawn with replacement, copied, or in several rows of a table."""
    if (count := repeated_images(val)) > REPEATED * len(val):
        warn(
            f"{count} of {len(val)} validation images are repeated, so that fewer calibrate than are counted and no "
            "rate holds; give each once: no sampler that draws with replacement, no copies, no row twice",
            LoaderWarning,
        )


def repeated_images(data: ImageDataset) -> int:
    """Return how many images are copies of one before them; only those that share a key are read."""
    positions: dict[bytes, list[int]] = {}
    for position, key in enumerate(image_keys(data)):
        positions.setdefault(key, []).append(position)
    alike = (group for group in positions.values() if len(group) > 1)
    contents = [[content for each in group if (content := _content(data, each)) is not None] for group in alike]
    return sum(len(group) - len({*group}) for group in contents)


def image_keys(data: ImageDataset) -> Iterator[bytes]:
    """Yield a key for each image; copies of it have the same key, and of other images in a data set mostly few."""
    return (_key(data, position) for position in range(len(data)))


def _key(data: ImageDataset, position: int) -> bytes:
    match _origin(data, position):
        case FileSource() as files, index:
            key = files.sample(index)
        case TensorSource(images=images), index:
            values = images[index].reshape(-1)
            key = values[:: max(1, len(values) // COMPARED_VALUES)].tobytes()
        case source, index:
            key = source.fingerprint(index)
    return _digest(key)


def _file_size(data: ImageDataset, position: int) -> int | None:
    """Return the size of an image's file; None for an image in memory."""
    source, index = _origin(data, position)
    return source.size(index) if isinstance(source, FileSource) else None


def _content(data: ImageDataset, position: int) -> bytes | None:
    """Return a digest of all of an image; None if it cannot be read."""
    with suppress(ImageError, OSError):
        match _origin(data, position):
            case FileSource() as files, index:
                return _digest(read_file(files.path(index)))
            case source, index:
                return _digest(source.fingerprint(index))
    return None


def _origin(data: ImageDataset, position: int) -> tuple[ImageSource, int]:
    """Return the store of an image, behind a cache, and its index there."""
    source, index = data.source, int(data.indices[position])
    return (source.origin, int(source.indices[index])) if isinstance(source, CachedSource) else (source, index)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


_LOOKED_AT: Final = 16  # number of files whose brightest sample is sought


def unused_levels(data: ImageDataset) -> str:
    """Return a warning if the first files of 16 bits have no sample above a quarter of the scale; else nothing."""
    top = 0
    for position in range(min(_LOOKED_AT, len(data))):
        source, index = _origin(data, position)
        with suppress(ImageError, OSError):
            if isinstance(source, FileSource) and (file := open_image(read_file(source.path(index)))).is_wide:
                top = max(top, int(np.asarray(file.decode()).max()))
    bits = next((bits for bits in (10, 12, 14) if 0 < top <= 1 << bits - 8), None)
    if bits is None:
        return ""
    return (
        f"files of 16 bits in {data.name} reach only level {top} of 255, as if {bits} bits were used: most of what "
        f"they show is rounded away; multiply the samples by {1 << 16 - bits} and write the files again, or grey ones "
        f"as TIFFs whose tag MaxSampleValue is {(1 << bits) - 1}, here and for the service"
    )


SHOWN_IMAGES: Final = 5  # maximum number of images that a message names
_AT_ONCE: Final = 256


@dataclass(frozen=True)
class Unreadable:
    """The images of a data set that cannot be decoded; if there are too many, only the first ones found."""

    positions: Int[Tensor, " n"]  # in the data set, ascending
    reasons: tuple[str, ...]  # for the first :data:`SHOWN_IMAGES`, each with the image's name

    def __len__(self) -> int:
        return len(self.positions)


def find_unreadable(dataset: ImageDataset, at_most: int, compute: Compute | None = None) -> Unreadable:
    """Find the images that cannot be decoded, until there are more than ``at_most``; all processes find the same."""
    compute = compute or Compute(torch.device("cpu"))
    is_bad = torch.zeros(len(dataset), dtype=torch.int64)
    if not isinstance(dataset.source, TensorSource):
        chunks = torch.split(torch.arange(compute.rank, len(dataset), compute.world), _AT_ONCE)
        with ThreadPoolExecutor(DECODERS, "psc-decode") as pool:
            total = len(range(compute.rank, len(dataset), compute.world))
            for chunk in track(chunks, total=total, description=f"decoding {dataset.name}", size=len):
                reasons = pool.map(lambda position: why_unreadable(dataset, position), chunk.tolist())
                is_bad[chunk] = torch.tensor([reason is not None for reason in reasons], dtype=torch.int64)
                if int(is_bad.sum()) > at_most:
                    break
    positions = compute.sum_(is_bad).nonzero().flatten()
    first = (why_unreadable(dataset, position) for position in positions[:SHOWN_IMAGES].tolist())
    return Unreadable(positions, tuple(filter(None, first)))


def why_unreadable(dataset: ImageDataset, position: int) -> str | None:
    """Return the reason why an image cannot be decoded, with its name; None if it can."""
    try:
        dataset.image(position)
    except (DataError, ImageError) as error:
        return str(error)
    return None


def without(dataset: ImageDataset, found: Unreadable) -> ImageDataset:
    """Return the data set without the images found, or the data set itself if there are none; some have to stay."""
    if not len(found):
        return dataset
    if len(found) == len(dataset):
        more = "; …" * (len(found) > SHOWN_IMAGES)
        raise DataError(f"no image of {dataset.name} can be decoded: {'; '.join(found.reasons)}{more}; replace them")
    is_kept = torch.ones(len(dataset), dtype=torch.bool)
    is_kept[found.positions] = False
    return dataset.subset(is_kept.nonzero().flatten())


def readable(
    sets: Sequence[ImageDataset], at_most: int, compute: Compute | None = None
) -> tuple[list[ImageDataset], tuple[str, ...]]:
    """Return the images that can be decoded, and lines of text about the others; with 0 none are searched for.

    Raise :class:`DataError` if there are more than ``at_most`` others, in all data sets together.
    """
    found: list[Unreadable] = []
    count, reasons = 0, list[str]()
    for data in sets if at_most else ():
        found.append(find_unreadable(data, at_most - count, compute))
        count, reasons = sum(map(len, found)), [reason for each in found for reason in each.reasons][:SHOWN_IMAGES]
        if count > at_most:
            raise DataError(
                f"expected at most {at_most} images that cannot be decoded, found more: {'; '.join(reasons)}"
                f"{'; …' * (count > SHOWN_IMAGES)}; repair or remove them, or leave out more by --max-bad-images"
            )
    if not count:
        return [*sets], ()
    kept = [without(data, bad) for data, bad in zip(sets, found, strict=True)]
    of_each = ", ".join(f"{len(bad)} of {data.name}" for data, bad in zip(sets, found, strict=True))
    return kept, (
        *(f"left out: {reason}" for reason in reasons),
        f"left out {count} that cannot be decoded: {of_each}",
    )
