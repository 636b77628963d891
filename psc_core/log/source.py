"""The logged images, as the source of a data set."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from psc_core.errors import DataError, ImageError
from psc_core.images.limits import PILLOW_MAX_PIXELS
from psc_core.images.preprocess import Preprocess
from psc_core.log.images import INPUT, pixels_of
from psc_core.log.schema import arrow, image_path
from psc_core.log.store import Log

_NAME: Final = re.compile(r"[0-9a-f]{64}\.[a-z]{3,4}")

_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class LoggedImages:
    """Images given by their paths in a log; an :class:`psc_core.data.sources.ImageSource`."""

    log: Log
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        """Return the image as the model's network reads it.

        Raises:
            DataError: If the image is missing, its bytes have changed since it was logged, or it was logged as a
                network input of another shape.
        """
        path = PurePosixPath(self.paths[index])
        where = f"{self.log.where}/{path}"
        try:
            content = self.log.get(self.paths[index])
            if hashlib.sha256(content).hexdigest() != path.stem:
                raise DataError(f"{where} was changed since it was logged; restore it or remove it")
            if path.suffix != f".{INPUT}":
                # The service has applied its own --max-pixels before it answered.
                return preprocess.from_bytes(content, max_pixels=PILLOW_MAX_PIXELS)
            pixels = pixels_of(content)
        except (OSError, ImageError) as error:
            raise DataError(f"cannot read the image {where}: {error}; restore it or remove it") from error
        if pixels.shape != preprocess.shape:
            raise DataError(
                f"{where} was sent as a network input of the shape {pixels.shape}, and the bundle's network reads "
                f"{preprocess.shape}; give a bundle with that input, or leave its days out"
            )
        return pixels

    def fingerprint(self, index: int) -> bytes:
        return self.paths[index].encode()

    def modified_ns(self, index: int) -> int:
        return 0  # Its path holds the digest of its content.


def is_stored(sha256: str | None, path: str | None) -> bool:
    """Return whether a row names a logged image by a valid path."""
    if not sha256 or not path:
        return False
    return path == image_path(sha256, PurePosixPath(path).suffix.removeprefix("."))


def open_logged_image(log: Log, name: str) -> tuple[Any, int]:
    """Open a logged image; return the file, at its beginning, and its size in bytes.

    Args:
        log: The log.
        name: ``SHA256.EXT``.

    Raises:
        FileNotFoundError: If there is no such regular file, or its content does not have this digest.
        OSError: If the log cannot be read.
    """
    digest, _, extension = name.partition(".")
    path = log.path(image_path(digest, extension))
    if not _NAME.fullmatch(name) or log.files.get_file_info(path).type != arrow().fs.FileType.File:
        raise FileNotFoundError(name)
    file = log.files.open_input_file(path)
    found = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        found.update(block)
    if found.hexdigest() != digest:
        file.close()
        raise FileNotFoundError(name)
    file.seek(0)
    return file, file.size()
