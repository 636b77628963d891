"""Decode each image only once: keep its pixels in a scratch file while a fit makes its passes.

The file has no name, so nothing is left of it however the process ends.  Its space is reserved before the file is
mapped, because otherwise a full disk would kill the process at a write to memory.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import ArraySource, ImageSource, RawImage, TensorSource
from psc_core.errors import UsageError
from psc_core.images.preprocess import Preprocess

FREE_FRACTION: Final = 0.5
"""Fraction of the free disk space that the scratch files may take."""


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


@dataclass(frozen=True)
class PixelCache:
    """A folder where each process of a fit keeps decoded images in scratch files."""

    folder: Path | None = None  # None for the system's
    processes: int = 1  # that keep them at the same time

    def size(self, *datasets: ImageDataset) -> int:
        """Return the bytes that the files for these data sets take, those of all processes together."""
        return self.processes * sum(map(pixel_bytes, datasets))

    def has_room(self, *datasets: ImageDataset) -> bool:
        """Return whether the files for these data sets leave enough of the free disk space.

        Raises:
            UsageError: If there is no such folder.
        """
        try:
            return self.size(*datasets) <= FREE_FRACTION * shutil.disk_usage(self.folder or tempfile.gettempdir()).free
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


def pixel_bytes(dataset: ImageDataset) -> int:
    """Return the bytes that the pixels of a data set take in a cache; 0 where its images need no decoding."""
    match dataset.source:
        case ArraySource() | TensorSource() as source if source.fits(dataset.preprocess):
            return 0
        case CachedSource(preprocess=dataset.preprocess):
            return 0
    return len(dataset) * math.prod(dataset.preprocess.shape)


def cached(dataset: ImageDataset, folder: Path | None = None) -> ImageDataset:
    """Return ``dataset`` with its pixels kept, or unchanged if they need no decoding or the system's disk is full.

    Args:
        dataset: A data set of n images, whose pixels take n · channels · height · width bytes.
        folder: The folder for the scratch file; None for the system's folder.

    Raises:
        UsageError: If ``folder`` is not a writable directory, or full.
    """
    size = pixel_bytes(dataset)
    if not size:
        return dataset
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="psc-pixels-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            pixels = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError as error:
        if folder is None:
            return dataset
        raise _unusable(folder, error) from error
    n = len(dataset)
    kept = CachedSource(
        dataset.source,
        dataset.indices.numpy(),
        dataset.preprocess,
        pixels.reshape(n, *dataset.preprocess.shape),
        np.zeros(n, np.bool_),
    )
    return replace(dataset, source=kept, indices=torch.arange(n))


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot store pixels in {folder}: {error.strerror}; choose another --cache or off")
