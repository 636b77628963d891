"""Nearest kept images, one pair at a time."""

import math
from collections.abc import Sequence


def nearest(coordinates: Sequence[float], kept: Sequence[Sequence[float]], count: int) -> list[tuple[float, int]]:
    """Distances and positions of the ``count`` nearest, the nearest first."""
    away = [(math.dist(coordinates, each), position) for position, each in enumerate(kept)]
    return sorted(away)[:count]
