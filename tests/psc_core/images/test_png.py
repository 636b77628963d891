"""Pixels as PNG files."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from psc_core.images.decode import FAST, SMALL, as_base64, png_of


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("level", [FAST, SMALL])
def test_a_png_holds_the_pixels(shape: tuple[int, ...], level: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with Image.open(io.BytesIO(base64.b64decode(as_base64(png_of(pixels, level))))) as picture:
        assert picture.format == "PNG" and picture.mode == ("RGB" if shape[0] == 3 else "L")
        expected = pixels.transpose(1, 2, 0) if shape[0] == 3 else pixels.reshape(5, 7)
        assert np.array_equal(np.asarray(picture), expected)
