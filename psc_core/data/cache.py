"""Decode each image only once: keep its pixels in a scratch file while a fit makes its passes.

The file has no name, so nothing is left of it however the process ends.  Its space is reserved before the file is
mapped, because otherwise a full disk would kill the process at a write to memory.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import ArraySource, ImageSource, RawImage, TensorSource
from psc_core.errors import UsageError
from psc_core.images.preprocess import Preprocess

FREE_FRACTION: Final = 0.5
"""Fraction of the free disk space that the scratch file may take."""


@dataclass(frozen=True)
class CachedSource:
    """The images of another source, decoded when they are first read; thread-safe."""

    source: ImageSource
    preprocess: Preprocess  # that made the pixels
    pixels: npt.NDArray[np.uint8]  # (n, channels, height, width); valid where is_decoded
    is_decoded: npt.NDArray[np.bool_]  # (n,)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, preprocess: Preprocess) -> RawImage:
        if preprocess != self.preprocess:
            return self.source.read(index, preprocess)
        if not self.is_decoded[index]:
            self.pixels[index] = self.source.read(index, preprocess)
            self.is_decoded[index] = True
        image: npt.NDArray[np.uint8] = self.pixels[index]
        return image

    def fingerprint(self, index: int) -> bytes:
        return self.source.fingerprint(index)


def cached(dataset: ImageDataset, folder: Path | None = None, *, processes: int = 1) -> ImageDataset:
    """Return ``dataset`` with its pixels kept, or unchanged if they need no decoding or do not fit on the disk.

    Args:
        dataset: A data set whose images take n · channels · height · width bytes.
        folder: The folder for the scratch file; None for the system's folder.
        processes: The number of processes that keep pixels at the same time.

    Raises:
        UsageError: If ``folder`` is not a writable directory.
    """
    source, shape = dataset.source, (len(dataset.source), *dataset.preprocess.shape)
    if isinstance(source, ArraySource | TensorSource) and source.fits(dataset.preprocess):
        return dataset
    size = int(np.prod(shape))
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="psc-pixels-") as file:
            if processes * size > FREE_FRACTION * shutil.disk_usage(folder or tempfile.gettempdir()).free:
                return dataset
            os.posix_fallocate(file.fileno(), 0, size)
            pixels = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8).reshape(shape)
    except OSError as error:
        if folder is None:
            return dataset
        raise UsageError(f"cannot store pixels in {folder}: {error.strerror}; choose another --cache or off") from error
    kept = CachedSource(source, dataset.preprocess, pixels, np.zeros(len(source), np.bool_))
    return replace(dataset, source=kept)
