"""Every suffix that a folder is searched for can be decoded."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from psc_core.images.decode import decode_image
from psc_core.images.formats import SUFFIXES


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_is_decoded(suffix: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4)).save(buffer, Image.registered_extensions()[suffix])
    assert decode_image(buffer.getvalue()).size == (5, 4)
