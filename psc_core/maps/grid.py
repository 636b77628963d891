"""Find the rows and columns of a layer's positions, which canonical features flatten into one row-major axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_SIDE: Final = 4
"""Minimum number of rows and of columns of a map."""

MAX_POSITIONS: Final = 1 << 12
"""Maximum number of positions of a map, 64 × 64, which take about 4 KiB in memory and as PNG."""

MAX_LEADING: Final = 8
"""Maximum number of leading tokens that show no part of the image: the class token and registers."""


@dataclass(frozen=True)
class Grid:
    """``rows`` × ``columns`` positions, row-major, after ``first`` positions that show no part of the image."""

    rows: int
    columns: int
    first: int = 0

    @property
    def positions(self) -> int:
        """The number of all positions of the layer."""
        return self.first + self.rows * self.columns


def grid_of(positions: int, height: int, width: int) -> Grid | None:
    """Return the grid of a layer with this number of positions, or None if no map can be made of it.

    Convolutions and patches take the same steps down and across, so rows : columns = height : width, each rounded.  Of
    the factorisations of ``positions`` the nearest to this ratio is taken, for a square image only a square; if there
    is none, the first positions are taken for leading tokens, as few as possible.

    Args:
        positions: The number of positions of the canonical features.
        height: The height of the network's input, in pixels.
        width: The width of the network's input, in pixels.

    Example:
        >>> grid_of(14 * 14, 224, 224), grid_of(1 + 14 * 14, 224, 224), grid_of(1, 224, 224)
        (Grid(rows=14, columns=14, first=0), Grid(rows=14, columns=14, first=1), None)
    """
    for first in range(MAX_LEADING + 1):
        rows = _rows(positions - first, height, width)
        if rows is not None:
            return Grid(rows, (positions - first) // rows, first)
    return None


def _rows(positions: int, height: int, width: int) -> int | None:
    """Return the number of rows of a grid without leading tokens."""
    if not MIN_SIDE**2 <= positions <= MAX_POSITIONS:
        return None
    fitting = [
        (abs(rows * width - columns * height), rows)
        for rows in range(MIN_SIDE, positions // MIN_SIDE + 1)
        if rows * (columns := positions // rows) == positions and _may_be(rows, columns, height, width)
    ]
    return min(fitting)[1] if fitting else None


def _may_be(rows: int, columns: int, height: int, width: int) -> bool:
    """Return whether the sides agree up to rounding: rows × width / height is within one of the columns."""
    if height == width:
        return rows == columns
    return abs(rows * width - columns * height) <= min(height, width) and rows <= height and columns <= width
