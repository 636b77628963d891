"""Limits that are checked before anything is decoded; tests/attacks/test_images.py has the files that need them."""

from __future__ import annotations

import struct

import pytest
from PIL import Image

from psc_core.errors import ImageTooLarge, UndecodableImage
from psc_core.images.decode import decode_image
from tests.psc_core.images.support import GRADIENT, encode, png_header_of


@pytest.mark.parametrize("side", [10_000, 20_000, 100_000])
def test_rejects_large_header_before_decoding(side: int) -> None:
    with pytest.raises(ImageTooLarge, match="pixels"):
        decode_image(png_header_of(side, side))


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("alpha", [True, False])
def test_rejects_large_webp_before_pillow_opens_it(
    lossless: bool, alpha: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image.new("RGBA" if alpha else "RGB", (37, 21), (1, 2, 3, 4)[: 4 if alpha else 3])
    data = encode(image, "WEBP", lossless=lossless)
    assert decode_image(data).size == (37, 21)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ImageTooLarge, match="37×21"):
        decode_image(data, max_pixels=36 * 21)


def test_pixel_limit_is_inclusive() -> None:
    data = encode(Image.fromarray(GRADIENT), "PNG")
    assert decode_image(data, max_pixels=24 * 32).size == (32, 24)
    with pytest.raises(ImageTooLarge):
        decode_image(data, max_pixels=24 * 32 - 1)


def test_scans_of_a_large_jpeg_count_with_its_pixels() -> None:
    image = Image.new("L", (400, 400), 9)
    progressive = encode(image, "JPEG", progressive=True)
    scans = progressive.count(b"\xff\xda")
    assert scans > 1 and decode_image(progressive).size == (400, 400)
    body, first = progressive.removesuffix(b"\xff\xd9"), progressive.index(b"\xff\xda")
    many = body + body[first:] * 4
    with pytest.raises(UndecodableImage, match="pixels in all scans together"):
        decode_image(many + b"\xff\xd9", max_pixels=400 * 400)


def run_length_bmp(side: int, commands: bytes) -> bytes:
    palette = bytes(1024)
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(commands), 0, 0, 256, 0)
    offset = 14 + len(head) + len(palette)
    return struct.pack("<2sIHHI", b"BM", offset + len(commands), 0, 0, offset) + head + palette + commands


def test_commands_of_a_run_length_bmp_count_with_its_pixels() -> None:
    row = bytes([8, 5, 0, 0])
    assert decode_image(run_length_bmp(8, row * 8 + b"\0\1")).size == (8, 8)
    still = b"\0\2\0\0" * 40_000  # Moves by nothing, so the image never ends.
    with pytest.raises(UndecodableImage, match="bytes of run-length code"):
        decode_image(run_length_bmp(8, still))
