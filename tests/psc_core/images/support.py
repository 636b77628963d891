"""Encoded images."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

GRADIENT = np.add.outer(np.arange(24), np.arange(32)).astype(np.uint8) * 4


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header_of(width: int, height: int) -> bytes:
    """A PNG whose header declares width × height and whose data is empty."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
