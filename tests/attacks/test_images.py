"""Hostile images: decoded or refused with an ImageError, quickly, whatever their header promises."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.errors import ImageError, ImageTooLarge, UndecodableImage, UnsupportedImage
from psc_core.images import FORMATS, decode_image
from psc_core.preprocess import PRESETS

MOST_PIXELS = 1 << 20


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < 5.0


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *middle: bytes, data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"".join([b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *middle, chunk(b"IDAT", data), chunk(b"IEND", b"")])


PIXELS = zlib.compress(b"\0" * 29 * 28)
ZEROS = zlib.compress(b"\0" * (64 << 20), 9)
"""64 MiB of zeros in 64 KiB."""

BOMBS = {
    "pixels": png(28, 28, data=ZEROS),
    "compressed text": png(28, 28, *[chunk(b"zTXt", b"k\0\0" + ZEROS)] * 4, data=PIXELS),
    "international text": png(28, 28, chunk(b"iTXt", b"k\0\1\0\0\0" + ZEROS), data=PIXELS),
    "colour profile": png(28, 28, chunk(b"iCCP", b"k\0\0" + ZEROS), data=PIXELS),
    "a thousand chunks": png(28, 28, *[chunk(b"tEXt", b"k\0v")] * 1000, data=PIXELS),
    "chunk of 2 GiB": png(28, 28, struct.pack(">I", 2**31 - 1) + b"tEXt", data=PIXELS),
    "EXIF": png(28, 28, chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 600), data=PIXELS),
    "no pixels": png(28, 28),
    "wide": png(2**31 - 1, 1, data=PIXELS),
    "no width": png(0, 28, data=PIXELS),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_a_png(name: str) -> None:
    try:
        array = PRESETS["mnist"].from_bytes(BOMBS[name], max_pixels=MOST_PIXELS)
    except ImageError as error:
        assert len(str(error)) < 500
    else:
        assert array.shape == (1, 28, 28)


@pytest.mark.parametrize("side", [65_535, 60_000])
def test_headers_of_other_formats(side: int) -> None:
    size = struct.pack("<HH", side, side)
    gif = b"GIF89a" + size + b"\0\0\0,\0\0\0\0" + size + b"\0\x02\0;"
    bmp = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    jpeg = encoded(Image.new("L", (8, 8)), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg = jpeg[:at] + struct.pack(">HH", side, side) + jpeg[at + 4 :]
    for data in (gif, bmp, jpeg):
        with pytest.raises(ImageTooLarge):
            decode_image(data, max_pixels=MOST_PIXELS)


def test_a_tiff_that_points_at_itself() -> None:
    tags = [(256, 4, 1, 28), (257, 4, 1, 28), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 2**31, 8), (279, 4, 2**31, 8)]
    body = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + struct.pack("<I", 8)
    with pytest.raises((UndecodableImage, UnsupportedImage)):
        decode_image(b"II*\0\x08\0\0\0" + body)


@pytest.mark.parametrize(
    "head",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"%PDF-1.7\n",
        b"<svg xmlns='x'>",
        b"P6 9 9 255\n",
        b"\0\0\0\x0cjP  \r\n\x87\n",
        b"\x80\x04\x95",
        b"PK\x03\x04",
        b"8BPS",
        b"#!/bin/sh\n",
    ],
)
def test_other_files_with_an_image_behind_them(head: bytes) -> None:
    with pytest.raises(UnsupportedImage):
        decode_image(head + encoded(Image.new("L", (8, 8))))


def test_a_polyglot_is_the_image_of_its_header() -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    data = encoded(red) + b"PK\x03\x04" + encoded(Image.new("L", (9, 9)))
    assert decode_image(data).size == (8, 8)


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 500), (500, 1)])
@pytest.mark.parametrize("preset", PRESETS)
def test_thin_images(preset: str, size: tuple[int, int]) -> None:
    shape = PRESETS[preset].from_bytes(encoded(Image.new("RGB", size)), max_pixels=MOST_PIXELS).shape
    assert shape == (PRESETS[preset].channels, PRESETS[preset].height, PRESETS[preset].width)


@pytest.mark.parametrize("size", [(1, MOST_PIXELS), (MOST_PIXELS, 1)])
def test_an_image_a_million_times_as_long_as_wide(size: tuple[int, int]) -> None:
    array = PRESETS["imagenet"].from_bytes(encoded(Image.new("RGB", size)), max_pixels=MOST_PIXELS)
    assert array.shape == (3, 224, 224)


@given(st.binary(max_size=200), st.sampled_from(FORMATS), st.integers(0, 400))
def test_noise_behind_a_good_start(noise: bytes, kind: str, keep: int) -> None:
    pixels = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)
    data = encoded(Image.fromarray(pixels), kind)[:keep] + noise
    try:
        array = PRESETS["mnist"].from_bytes(data, max_pixels=MOST_PIXELS)
    except ImageError:
        return
    assert array.shape == (1, 28, 28)
