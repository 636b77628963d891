"""Encode pixels as PNG files, and files as text for JSON and pages."""

from __future__ import annotations

import base64
import io
from typing import Any, Final

import numpy.typing as npt
from PIL import Image

FAST: Final = 1
"""The zlib level for pictures that a client waits for."""

SMALL: Final = 6
"""The zlib level for pictures that are stored."""


def png_of(pixels: npt.NDArray[Any], level: int = FAST) -> bytes:
    """Encode ``uint8 (rows, columns)`` or ``(1 or 3 channels, rows, columns)`` as an 8-bit PNG."""
    channels_last = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
    file = io.BytesIO()
    Image.fromarray(channels_last.squeeze(2) if channels_last.shape[2:] == (1,) else channels_last).save(
        file, "PNG", compress_level=level
    )
    return file.getvalue()


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
