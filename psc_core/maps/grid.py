"""The rows and columns behind a layer's positions, which canonical features have in one row-major axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_SIDE: Final = 4
"""Minimum number of rows and of columns of a map."""

MAX_POSITIONS: Final = 1 << 12
"""Maximum number of positions of a map, 64 × 64: its bytes in memory, and about those of its PNG."""

MAX_LEADING: Final = 8
"""Maximum number of tokens before those of an image's parts: of the class, and registers."""


@dataclass(frozen=True)
class Grid:
    """``rows`` × ``columns`` positions, row-major, behind ``first`` that show no part of the image."""

    rows: int
    columns: int
    first: int = 0

    @property
    def positions(self) -> int:
        """All positions of the layer."""
        return self.first + self.rows * self.columns


def grid_of(positions: int, height: int, width: int) -> Grid | None:
    """Return the grid of a layer with so many positions; None where it has none that a map can be made of.

    Convolutions and patches take the same steps down and across, so that rows : columns = height : width, each rounded.
    Of the ways to write the positions as a product the nearest to that is taken, of a square image only a square;
    where there is none, the first positions are taken for leading tokens, as few as possible.

    Args:
        positions: Of the canonical features.
        height: Of the network's input, pixels.
        width: Likewise.

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
