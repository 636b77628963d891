"""File names of logged images, and pixels as files."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from psc_core.images.decode import IMAGE_FORMATS
from psc_core.log.store import extension_of, file_of, pixels_of


@pytest.mark.parametrize("name", IMAGE_FORMATS)
def test_extension_of_every_format_that_is_decoded(name: str) -> None:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, name)
    extension = extension_of(file.getvalue())
    assert Image.registered_extensions()[f".{extension}"] == name
    assert extension_of(b"?") == "img"


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_a_file_that_gives_them_back(channels: int) -> None:
    pixels = np.arange(channels * 15, dtype=np.uint8).reshape(channels, 3, 5)
    assert np.array_equal(pixels_of(file_of(pixels)), pixels)


def test_digest_of_pixels_stays_the_same() -> None:
    digest = hashlib.sha256(file_of(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))).hexdigest()
    assert digest == "e53b3843a04b72edfb0349945cd760b4b8d5a19e0a2b06ef3ef6f8ff8a69c645"
