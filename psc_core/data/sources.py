"""Random access to images: arrays, encoded files in memory or files on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from PIL import Image

from psc_core.errors import DataError, ImageError
from psc_core.images.files import read_file, sample_file
from psc_core.images.preprocess import Preprocess

RawImage = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
"""One image (channels, height, width): ``uint8`` pixels, or a ``float32`` input from a loader."""


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


class _IdentifiedByContent:
    def modified_ns(self, index: int) -> int:
        return 0


@dataclass(frozen=True)
class ArraySource(_IdentifiedByContent):
    """Grey images in one ``uint8 (n, height, width)`` array."""

    images: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        return preprocess.from_image(Image.fromarray(self.images[index]))

    def fits(self, preprocess: Preprocess) -> bool:
        """Return whether ``preprocess`` leaves these images unchanged, so that they can be read all at once."""
        return preprocess.resize is None and (1, *self.images.shape[1:]) == preprocess.shape

    def take(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return images as ``(n, 1, height, width)``; valid only if :meth:`fits`."""
        return self.images[indices][:, None]

    def fingerprint(self, index: int) -> bytes:
        return bytes(self.images[index].data)


@dataclass(frozen=True)
class TensorSource(_IdentifiedByContent):
    """Images of the network's size in one array (n, channels, height, width): ``float32`` inputs or ``uint8`` pixels.

    They cannot be resized.
    """

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
        """Return whether the images have the size that ``preprocess`` gives."""
        return self.images.shape[1:] == preprocess.shape

    def take(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return images as ``(n, channels, height, width)``."""
        taken: npt.NDArray[Any] = self.images[indices]
        return taken

    def fingerprint(self, index: int) -> bytes:
        return bytes(self.images[index].data)


@dataclass(frozen=True)
class EncodedSource(_IdentifiedByContent):
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
    """Encoded image files on disk, identified by their size and their path below ``root``.

    ``names`` holds these paths as ``bytes (n,)``: one array, because ``Path`` objects take ten times as much memory.
    """

    root: Path
    names: npt.NDArray[Any]

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
