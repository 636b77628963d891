"""Logged images as files: their extension and media type, and pixels as a file with a reproducible digest."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from psc_core.images.decode import decode_image
from psc_core.images.limits import PILLOW_MAX_PIXELS

_EXTENSIONS: Final = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG", "png"),
    (b"BM", "bmp"),
    (b"GIF8", "gif"),
    (b"II", "tif"),
    (b"MM", "tif"),
    (b"RIFF", "webp"),
)
"""The first bytes of the formats in :data:`psc_core.images.decode.IMAGE_FORMATS`, with their extensions."""

INPUT: Final = "dib"
"""The extension of a network input that came as pixels, a BMP file by its other name; received files never get it."""

MEDIA_TYPES: Final = {
    "jpg": "image/jpeg",
    **{name: f"image/{name}" for name in ("png", "bmp", "gif", "webp")},
    "tif": "image/tiff",
    INPUT: "image/bmp",
}
"""The media type of each extension."""


def extension_of(data: bytes) -> str:
    """Return the extension, without its dot, for the file of an image that was decoded."""
    return next((extension for signature, extension in _EXTENSIONS if data.startswith(signature)), "img")


def file_of(pixels: npt.NDArray[Any]) -> bytes:
    """Encode ``uint8 (1 or 3, height, width)`` as a BMP file, whose digest depends on no library's compression."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    file = io.BytesIO()
    image.save(file, "BMP")
    return file.getvalue()


def pixels_of(file: bytes) -> npt.NDArray[np.uint8]:
    """Return the pixels that :func:`file_of` encoded; may raise :class:`.ImageError`."""
    pixels = np.atleast_3d(np.asarray(decode_image(file, max_pixels=PILLOW_MAX_PIXELS)))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
