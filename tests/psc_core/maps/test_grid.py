"""Grids from numbers of positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psc_core.maps import MAX_POSITIONS, MIN_SIDE, Grid, grid_of


@pytest.mark.parametrize(
    ("positions", "height", "width", "expected"),
    [
        (49, 224, 224, Grid(7, 7)),
        (197, 224, 224, Grid(14, 14, 1)),
        (201, 224, 224, Grid(14, 14, 5)),
        (14 * 20, 224, 320, Grid(14, 20)),
        (15 * 10, 480, 320, Grid(15, 10)),
        (4 * 6, 28, 40, Grid(4, 6)),
        (1, 224, 224, None),
        (9, 224, 224, None),
        (12 * 14, 224, 224, None),
        (128 * 128, 1024, 1024, None),
    ],
)
def test_known_layers(positions: int, height: int, width: int, expected: Grid | None) -> None:
    assert grid_of(positions, height, width) == expected


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 300))
def test_a_grid_covers_its_positions(positions: int, height: int, width: int) -> None:
    grid = grid_of(positions, height, width)
    if grid is not None:
        assert grid.positions == positions and grid.rows * grid.columns <= MAX_POSITIONS
        assert min(grid.rows, grid.columns) >= MIN_SIDE


@given(st.integers(8, 40), st.integers(8, 40), st.integers(1, 4))
def test_strided_layers_keep_the_sides(rows: int, columns: int, stride: int) -> None:
    height, width = rows * stride, columns * stride
    grid = grid_of(rows * columns, height, width)
    assert grid is not None and grid.first == 0
    assert abs(grid.rows * width - grid.columns * height) <= min(height, width)
