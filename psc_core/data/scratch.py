"""Keep images whose number is not known beforehand in a file while a fit makes its passes.

The file has no name, so nothing is left of it however the process ends.  It is written before it is mapped, so a full
disk is an error at a write; reserving the space would need the size beforehand.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from psc_core.data.cache import FREE_FRACTION
from psc_core.errors import DataError, UsageError

ELSEWHERE: Final = "set TMPDIR to a folder of a larger disk"
"""The remedy for a full disk, for messages."""


@dataclass
class Scratch:
    """Batches of images of one shape and dtype, appended to a file."""

    name: str  # of the data set, for messages
    file: IO[bytes]
    room: int  # maximum size, bytes
    first: npt.NDArray[Any] | None = None  # an empty array with the images' shape and dtype
    count: int = 0  # batches written
    size: int = 0  # bytes written

    def append(self, images: npt.NDArray[Any]) -> None:
        """Write a batch (n, channels, height, width).

        Raises:
            DataError: If its shape or dtype differs from the batches before it.
            UsageError: If it does not fit on the disk.
        """
        first = images if self.first is None else self.first
        if images.shape[1:] != first.shape[1:] or images.dtype != first.dtype:
            raise DataError(
                f"{self.name}: expected images of one shape and type, batch {self.count} has {images.dtype} "
                f"{images.shape[1:]}, those before {first.dtype} {first.shape[1:]}; resize them in the transform, or "
                "give a preprocess"
            )
        self.check_room(self.size + images.nbytes, images.dtype)
        left = memoryview(images.tobytes())
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise UsageError(
                f"cannot store {self.name} in {tempfile.gettempdir()}: {error.strerror}; {ELSEWHERE}"
            ) from error
        self.first = first[:0]
        self.count += 1
        self.size += images.nbytes

    def check_room(self, size: int, dtype: npt.DTypeLike) -> None:
        """Raise :class:`UsageError` if a file of ``size`` bytes does not fit on the disk."""
        if size > self.room:
            smaller = "" if dtype == np.uint8 else ", or uint8 images with preprocess=…, which take a quarter"
            raise UsageError(
                f"{self.name} takes {size / 2**30:.3g} GiB on the disk while a fit runs, of {tempfile.gettempdir()} "
                f"{self.room / 2**30:.3g} GiB may be used; {ELSEWHERE}, give fewer images "
                f"(torch.utils.data.Subset){smaller}"
            )

    def images(self) -> npt.NDArray[Any]:
        """Map everything appended, (n, channels, height, width), read-only; the array outlives the file object.

        Raises:
            DataError: If nothing was appended.
        """
        if self.first is None:
            raise DataError(f"{self.name} gave no images; an iterator gives them only once, so give the loader itself")
        mapped = mmap.mmap(self.file.fileno(), self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, self.first.dtype).reshape(-1, *self.first.shape[1:])


def temporary_folder() -> str:
    """Return the folder of scratch files; raise :class:`UsageError` if there is none that may be written to."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(f"a fit needs a folder for temporary files: {error.strerror}; set TMPDIR to one") from error


@contextmanager
def scratch_file(name: str) -> Iterator[Scratch]:
    """Open an empty scratch file for the images of the data set ``name``; raises :class:`UsageError` if none can be."""
    temporary_folder()
    with tempfile.TemporaryFile(prefix="psc-inputs-", buffering=0) as file:
        yield Scratch(name, file, int(FREE_FRACTION * shutil.disk_usage(tempfile.gettempdir()).free))
