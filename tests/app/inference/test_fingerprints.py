"""Fingerprints of images, on the event loop and on a thread."""

from __future__ import annotations

import numpy as np
import pytest

from app.inference.decoder import EncodedImage, fingerprints

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("repeated", [1, 300_000])
async def test_identical_files_and_no_others_are_equal(repeated: int) -> None:
    first, again, other = await fingerprints(
        [EncodedImage(b"abc" * repeated), EncodedImage(b"abc" * repeated, "b.png"), EncodedImage(b"abd" * repeated)]
    )
    assert first == again != other


@pytest.mark.parametrize("size", [8, 800])
async def test_identical_pixels_and_no_others_are_equal(size: int) -> None:
    images = np.zeros((3, 1, size, size), np.uint8)
    images[2, 0, -1, -1] = 1
    first, again, other = await fingerprints(images)
    assert first == again != other
    assert await fingerprints(images[::-1]) == [other, again, first]
