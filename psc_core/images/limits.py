"""Limits on an image file, checked before Pillow opens it and without decoding any pixel.

The first limit is the number of pixels.  Some formats let a small file demand far more work than its pixels and bytes
suggest, so these are limited too: scans of a JPEG, tiles and strips of a TIFF, segments of a header, EXIF.
"""

from __future__ import annotations

import io
import re
import struct
from typing import Final

import numpy as np

from psc_core.errors import ImageTooLarge, UndecodableImage

DEFAULT_MAX_PIXELS: Final = 25_000_000
"""Default maximum of width × height, in pixels: the 24 megapixels of a camera fit."""

PILLOW_MAX_PIXELS: Final = 178_956_970
"""Maximum number of pixels that Pillow itself reads."""

MAX_SCANS: Final = 100
"""Maximum number of scans of a JPEG, because a scan of 80 bytes may cost a pass over all pixels.

libjpeg writes 10 (18 for CMYK); libtiff sets the same limit for JPEG in TIFF.
"""

_MAX_PIECES: Final = 10_000
"""Maximum number of JPEG segments and bytes between them, PNG chunks or GIF blocks: Pillow reads each in Python."""

_PASSES: Final = 10
"""Maximum number of pixels in all scans of a JPEG, in units of ``max_pixels``; small images may have more scans."""

MAX_EXIF_BYTES: Final = 1 << 20
"""Maximum number of bytes of EXIF, because Pillow needs two hundred times as much memory to unpack them."""

_MAX_PROFILES: Final = 16
"""Maximum number of colour profiles of a PNG, because 1 kB may unpack to 1 MB."""

_MAX_TAGS: Final = 4096
"""Maximum number of tags of a TIFF; libtiff sets the same limit."""

_MAX_VALUES: Final = 3 << 16
"""Maximum number of values of a TIFF tag, the size of a transfer function: Pillow makes an object of each value."""

_MAX_OVERLAP: Final = 10
"""Maximum number of times that the strips of a TIFF may cover its bytes, on average."""

_MARKER: Final = re.compile(rb"\xff[\xc0-\xc7\xc9-\xcf\xd9-\xef\xfe]")
"""The start of a JPEG segment; in compressed pixels 0xFF is followed by 0 or a restart marker, 0xD0 to 0xD7."""

_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}

_SIDES: Final = (256, 257, 322, 323)
_STRIP_BYTES, _TILE_BYTES = 279, 325
"""TIFF tags: width and height of the image, width and height of a tile, bytes of each strip and of each tile."""

_NUMBERS: Final = {3: "u2", 4: "u4", 16: "u8"}
_TEXTS: Final = (1, 2, 7)
"""The types of TIFF tags that hold bytes; the types in :data:`_NUMBERS` hold integers."""


def check_file(data: bytes, max_pixels: int) -> io.BytesIO:
    """Check everything that would be expensive when Pillow opens or loads the file, and return a file for Pillow.

    Raises:
        ImageTooLarge: If it has more than ``max_pixels``, in a format for which Pillow allocates memory on opening.
        UndecodableImage: If it would cost far more to decode than its pixels.
    """
    check_pixels(*_webp_size(data), max_pixels)
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data, max_pixels)
    elif data.startswith(b"\x89PNG"):
        _check_png(data)
    elif data.startswith(b"GIF8"):
        return _Reader(data)
    elif data[:2] in (b"II", b"MM") and (42 in data[2:4] or 43 in data[2:4]):
        _check_tiff(data, max_pixels)
    return io.BytesIO(data)


def check_pixels(width: int, height: int, max_pixels: int, what: str = "the header declares") -> None:
    """Raise :class:`ImageTooLarge` if the image has more than ``max_pixels``."""
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"expected at most {max_pixels} pixels, {what} {width}×{height} = {width * height}; use a smaller image"
        )


def check_limit(what: str, maximum: int, got: int) -> None:
    """Raise :class:`UndecodableImage` if there are more than ``maximum``."""
    if got > maximum:
        raise UndecodableImage(f"expected at most {maximum} {what}, got {got} or more; save the image again")


class _Reader(io.BytesIO):
    """A file that Pillow can read in a limited number of pieces."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        # An honest file of this size may have more pieces than the constant.
        self._maximum = _MAX_PIECES + len(data) // 32
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        check_limit("pieces in a file of this size", self._maximum, self._reads)
        return super().read(size)


def _check_png(data: bytes) -> None:
    # An honest file of this size may have more chunks than the constant.
    at, maximum, chunks, profiles, chunk_type = 8, _MAX_PIECES + len(data) // 128, 0, 0, b""
    while chunk_type != b"IEND" and at + 8 <= len(data):
        length, chunk_type = struct.unpack_from(">I4s", data, at)
        at += 12 + length
        chunks += 1
        profiles += chunk_type == b"iCCP"
        check_limit("colour profiles", _MAX_PROFILES, profiles)
        check_limit("chunks in a file of this size", maximum, chunks)


def _check_jpeg(data: bytes, max_pixels: int) -> None:
    """Limit the scans, their pixels and the segments of a JPEG's first image, walking them as libjpeg does."""
    at, scans, segments, exif, pixels = 2, 0, 0, 0, 0
    while found := _MARKER.search(data, at):
        segments += 1 if scans else 1 + found.start() - at
        at = found.end()
        marker = data[at - 1]
        if marker == _END:
            if scans:
                return
            continue
        length = max(2, int.from_bytes(data[at : at + 2], "big"))
        if marker == _SCAN:
            scans += 1
            check_limit("scans", MAX_SCANS, scans)
            check_limit("pixels in all scans together", _PASSES * max_pixels, scans * pixels)
        elif marker in _FRAMES:
            height, width = struct.unpack(">HH", data[at + 3 : at + 7].ljust(4, b"\0"))
            check_pixels(width, height, max_pixels)
            pixels = max(pixels, width * height)
        elif marker == _APP1 and data.startswith(b"Exif\0\0", at + 2):
            exif += length
            check_limit("bytes of EXIF", MAX_EXIF_BYTES, exif)
        check_limit("segments", _MAX_PIECES, segments)
        at += length


def _check_tiff(data: bytes, max_pixels: int) -> None:
    """Limit what the first directory of a TIFF declares: pixels including tile padding, values, bytes of all strips."""
    order, big = "<" if data[:2] == b"II" else ">", data[2] == 43
    (at,) = struct.unpack_from(order + ("Q" if big else "L"), data, 8 if big else 4)
    (number,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
    check_limit("tags", _MAX_TAGS, number)
    at += 8 if big else 2
    entry = struct.Struct(order + ("HHQ8s" if big else "HHL4s"))
    number = min(number, (len(data) - at) // entry.size)
    found: dict[int, int] = {}
    for tag, number_type, count, value in entry.iter_unpack(data[at : at + number * entry.size]):
        if number_type not in _TEXTS:
            check_limit(f"values of tag {tag}", _MAX_VALUES, count)
        if tag not in (*_SIDES, _STRIP_BYTES, _TILE_BYTES):
            continue
        if number_type not in _NUMBERS or tag in found:
            raise UndecodableImage(f"expected tag {tag} once, as integers; save the image again")
        form = np.dtype(order + _NUMBERS[number_type])
        size = count * form.itemsize
        start = int.from_bytes(value, "little" if order == "<" else "big")
        stored = value[:size] if size <= len(value) else data[start : start + size]
        found[tag] = int(np.frombuffer(stored, form, len(stored) // form.itemsize).sum(dtype=np.float64))
    for tag in (_STRIP_BYTES, _TILE_BYTES):
        check_limit("bytes of strips", _MAX_OVERLAP * len(data), found.get(tag, 0))
    width, height, tile_width, tile_height = (found.get(tag, 0) for tag in _SIDES)
    if tile_width and tile_height:
        check_pixels(tile_width, tile_height, max_pixels, "a tile has")
        columns, rows = -(-width // tile_width), -(-height // tile_height)
        # Padding up to whole tiles at most doubles each side of an image that is larger than a tile.
        check_pixels(columns * tile_width, rows * tile_height, 4 * max_pixels, "the tiles have")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of a WebP, whose canvas Pillow allocates on opening; (0, 0) for any other file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0, 0
    chunk_type = data[12:16]
    if chunk_type == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if chunk_type == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk_type == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0
