"""Limits that are checked before anything is decoded; tests/attacks/test_images.py has the files that need them."""

from __future__ import annotations

import pytest
from PIL import Image

from psc_core.errors import ImageTooLarge
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
