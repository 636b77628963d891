"""Encoded images."""

import struct
import zlib

import numpy as np

GRADIENT = np.add.outer(np.arange(24), np.arange(32)).astype(np.uint8) * 4


def chunk(kind: bytes, body: bytes) -> bytes:
    """One of the pieces that a PNG is made of."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def tiff_of(samples: np.ndarray, **tags: int | float | tuple[int | float, ...]) -> bytes:  # type: ignore[type-arg]
    """An uncompressed TIFF of (height, width) or (height, width, channels) samples; tags are given as ``t258=16``.

    Without others, they say what the dtype says: its bits, its form, black is zero or RGB.
    """
    order = ">" if samples.dtype.str.startswith(">") else "<"
    height, width = samples.shape[:2]
    channels = samples.shape[2] if samples.ndim == 3 else 1
    data, form = samples.tobytes(), {"u": 1, "i": 2, "f": 3, "c": 6}[samples.dtype.kind]
    values = {"t256": width, "t257": height, "t258": (8 * samples.itemsize,) * channels, "t259": 1}
    values |= {"t262": 2 if channels >= 3 else 1, "t273": 8, "t277": channels, "t278": height, "t279": len(data)}
    values |= {"t339": (form,) * channels, **tags}  # type: ignore[dict-item]
    entries, behind = b"", b""
    end = 8 + len(data) + 2 + 12 * len(values) + 4
    for name, given in sorted(values.items()):
        each = given if isinstance(given, tuple) else (given,)
        code = "f" if isinstance(each[0], float) else "i" if min(each) < 0 else "I"
        packed = struct.pack(f"{order}{len(each)}{code}", *each)
        if len(packed) > 4:
            packed, behind = struct.pack(f"{order}I", end + len(behind)), behind + packed
        entries += struct.pack(f"{order}HHI", int(name[1:]), {"f": 11, "i": 9, "I": 4}[code], len(each)) + packed
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(values)) + entries + bytes(4) + behind


def png_of(rows: bytes, width: int, height: int, depth: int, colours: int, **chunks: bytes) -> bytes:
    """A PNG of rows that each begin with a zero, with further chunks before the pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    further = b"".join(chunk(name.encode(), body) for name, body in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + head + further + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
