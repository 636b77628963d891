from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from psc_core.errors import UndecodableImage, UnsupportedImage
from psc_core.images.decode import decode_image
from tests.psc_core.images.support import GRADIENT, encode, png_of, tiff_of

COLOURS = np.dstack([GRADIENT, GRADIENT[::-1], 255 - GRADIENT])


def jpeg_of(frame: int, bits: int = 8) -> bytes:
    """A JPEG whose frame says that it is of another kind."""
    data = bytearray(encode(Image.fromarray(COLOURS), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = frame, bits
    return bytes(data)


def bmp_of(bits: int, compression: int, data: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, 32, 24, 1, bits, compression, len(data), 0, 0, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 54 + len(data), 0, 0, 54) + head + data


UNREAD = {
    "64-bit floating-point": tiff_of(GRADIENT.astype("<f8")),
    "16-bit floating-point": tiff_of(GRADIENT.astype("<f2")),
    "64-bit unsigned": tiff_of(GRADIENT.astype("<u8")),
    "64-bit complex": tiff_of(GRADIENT.astype("<c8"), t339=6),
    "32-bit floating-point samples, RGB": tiff_of(COLOURS.astype("<f4") / 255),
    "white is zero, big-endian": tiff_of(GRADIENT.astype(">u2"), t262=0),
    "5 channels": tiff_of(np.dstack([GRADIENT] * 5), t262=1),
    "10-bit": tiff_of(GRADIENT, t258=10, t256=16),
    "camera raw": tiff_of(GRADIENT, t262=32803),
    "LERC": tiff_of(GRADIENT, t259=34887),
    "JPEG 2000": tiff_of(GRADIENT, t259=34712),
    "(12345)|12345": tiff_of(GRADIENT, t259=12345),
    "separate planes": tiff_of(
        COLOURS.transpose(2, 0, 1).reshape(24, 32, 3), t262=6, t284=2, t273=(8, 776, 1544), t279=(768,) * 3, t530=(1, 1)
    ),
    "planes": tiff_of(COLOURS.astype("<u2"), t284=2, t273=(8, 1544, 3080), t279=(1536,) * 3),
    "subsampled": tiff_of(COLOURS, t262=6, t530=(2, 2)),
    "BigTIFF": b"MM\0+\0\x08\0\0" + struct.pack(">Q", 16) + bytes(64),
    "12-bit": jpeg_of(0xC1, 12),
    "lossless JPEG with 16-bit": jpeg_of(0xC3, 16),
    "hierarchical": jpeg_of(0xC5),
    "JPEG-LS": jpeg_of(0xF7),
    "BMP with 0-bit samples and compression 4": bmp_of(0, 4, encode(Image.fromarray(COLOURS), "JPEG")),
    "BMP with 64-bit": bmp_of(64, 0, bytes(32 * 24 * 8)),
    "CgBI": png_of(b"", 1, 1, 8, 6).replace(b"\0\0\0\rIHDR", b"\0\0\0\4CgBIP\0 \2\x2b\xd5\xb3\x7f\0\0\0\rIHDR"),
}
"""Intact files that Pillow does not read, or not right, by what the message has to name."""


@pytest.mark.parametrize("named", UNREAD)
def test_intact_file_of_an_unread_kind(named: str) -> None:
    with pytest.raises(UnsupportedImage) as caught:
        decode_image(UNREAD[named])
    assert any(each in str(caught.value) for each in named.split("|")) and "convert" in str(caught.value)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("named", ["64-bit floating-point", "LERC", "12-bit", "BMP with 64-bit"])
def test_a_part_of_such_a_file_is_damaged(named: str) -> None:
    data = UNREAD[named]
    with pytest.raises(UndecodableImage):
        decode_image(
            data[: 60 if named.startswith("BMP") else len(data) // 2].replace(b"\x36\0\0\0\x28", b"\xff\0\0\0\x28")
        )


@pytest.mark.parametrize("frame", [0xC0, 0xC1, 0xC2])
def test_damaged_data_of_a_kind_that_is_read(frame: int) -> None:
    data = jpeg_of(frame)
    with pytest.raises(UndecodableImage):
        decode_image(data[: len(data) // 2])
    with pytest.raises(UndecodableImage):
        decode_image(tiff_of(GRADIENT, t259=8))


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"/annex/objects/SHA256E-s1--0.jpg\n", "git annex get"),
        (b"\n<!DOCTYPE html>", "HTML"),
        (b"\xef\xbb\xbf <HTML>", "HTML"),
        (b'{"error": "not found"}', "JSON"),
        (b'<?xml version="1.0"?><Error/>', "XML"),
        (b"data:image/png;base64,iVBORw0KGgo", "base64"),
        (b"iVBORw0KGgoAAAANSUhEUg", "base64"), (b"\0\0\0\x1cftypavif", "AVIF"), (b"\0\0\0\x1cftypheic", "HEIC"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"), (b"\xff\x0a", "JPEG XL"), (b"%PDF-1.7", "PDF"),
        (b"PK\x03\x04", "ZIP"), (b"", "no data"),
    ],
)  # fmt: skip
def test_other_files_are_named(start: bytes, named: str) -> None:
    with pytest.raises(UnsupportedImage, match=named):
        decode_image(start + bytes(100) if start else start)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF"])
def test_first_frame_of_an_animation_is_read(kind: str) -> None:
    frames = [Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode_image(encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)).convert("RGB")
    assert abs(np.asarray(found).astype(int) - COLOURS).mean() < (8 if kind == "GIF" else 1)


def test_cmyk_of_a_tiff_is_read() -> None:
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")
    assert decode_image(data).getpixel((1, 1)) == (255, 0, 0)
