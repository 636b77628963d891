"""Pictures of maps."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from PIL import Image

from psc_core.images.decode import png_of
from psc_core.maps import box_of, map_document
from tests.reference import maps as naive

GREYS = st_numpy.arrays(np.uint8, st_numpy.array_shapes(min_dims=2, max_dims=2, max_side=8))


@given(GREYS)
def test_a_box_matches_the_twin(grey: np.ndarray) -> None:
    assert box_of(grey) == pytest.approx(naive.box(grey.tolist()))


@given(GREYS)
def test_a_png_holds_the_levels(grey: np.ndarray) -> None:
    with Image.open(io.BytesIO(png_of(grey))) as picture:
        assert picture.mode == "L" and np.array_equal(np.asarray(picture), grey)


@given(st.integers(0, 7), st.integers(0, 7))
def test_a_bright_point_is_boxed(row: int, column: int) -> None:
    grey = np.full((8, 8), 20, np.uint8)
    grey[row, column] = 255
    assert box_of(grey) == (column / 8, row / 8, (column + 1) / 8, (row + 1) / 8)


def test_a_black_map_is_boxed_as_a_whole() -> None:
    document = map_document("early", np.zeros((4, 6), np.uint8))
    assert document["box"] == (0.0, 0.0, 1.0, 1.0) and document["layer"] == "early"
    assert base64.b64decode(document["png"]).startswith(b"\x89PNG")
