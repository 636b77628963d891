"""Distances of images from kept images, one pair at a time."""

import math
import statistics
from collections.abc import Sequence

Points = Sequence[Sequence[float]]


def distances(coordinates: Points, kept: Points) -> list[list[float]]:
    return [[math.dist(each, other) for other in kept] for each in coordinates]


def ordinary(kept: Points) -> float | None:
    """The lower median of the distances to the nearest other kept image."""
    rows = range(len(kept))
    nearest = [min(math.dist(kept[i], kept[j]) for j in rows if j != i) for i in rows if len(kept) > 1]
    return statistics.median_low(nearest) if nearest else None
