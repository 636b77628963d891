"""Naive twins of :mod:`psc_core.maps`: one vector, one position and one level at a time, in float64."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from tests.reference.checks import tail_excess

Array = npt.NDArray[np.float64]


def moments(vectors: Sequence[Array]) -> tuple[Array, Array]:
    """Mean and covariance of vectors, with their number as denominator."""
    mean = sum(vectors) / len(vectors)
    return mean, sum(np.outer(v - mean, v - mean) for v in vectors) / len(vectors)


def distance(vector: Array, mean: Array, covariance: Array, *, dead: float, floor: float, most: int) -> float:
    """Squared distance along the components of least variance that are more than rounding."""
    scale = math.sqrt(covariance.trace() / len(mean))
    std = np.array([max(math.sqrt(variance), dead * scale) for variance in covariance.diagonal()])
    values, vectors = np.linalg.eigh(covariance / np.outer(std, std))
    kept = [i for i in range(len(mean)) if values[i] > floor][: min(most, -(-len(mean) // 2))]
    return sum(float(((vector - mean) / std) @ vectors[:, i]) ** 2 / values[i] for i in kept)


def averaged(distances: Array) -> Array:
    """Each over its neighbours in the grid, corners included."""
    rows, columns = distances.shape
    means = np.zeros_like(distances)
    for y, x in np.ndindex(rows, columns):
        near = [
            distances[j, i]
            for j in range(max(0, y - 1), min(rows, y + 2))
            for i in range(max(0, x - 1), min(columns, x + 2))
        ]
        means[y, x] = math.fsum(near) / len(near)
    return means


def thresholds(values: Sequence[float], levels: int, decades: int, tail: float) -> Array:
    """The value that a fraction 10^(−decades · g / levels) reaches, for g = 1, 2, …"""
    ordered, m = sorted(values), len(values)
    log_t = [math.log((m - i) / (m + 1)) for i in range(m)]
    excess = tail_excess(ordered, max(1, round(tail * m)))
    logs = -decades * math.log(10) * np.arange(1, levels + 1) / levels
    inside = np.interp(logs, log_t[::-1], ordered[::-1])
    return np.where(logs <= log_t[-1], ordered[-1] + (log_t[-1] - logs) * excess, inside)


def farthest(vectors: Sequence[Sequence[float]], count: int) -> list[int]:
    """Rows of which each is the farthest from those before; the first is row 0."""
    chosen = [0]
    while len(chosen) < count:
        away = [min(math.dist(vector, vectors[row]) for row in chosen) for vector in vectors]
        chosen.append(away.index(max(away)))
    return chosen


def box(grey: Array, part: float) -> tuple[float, float, float, float]:
    """The box of the region of the largest sum."""
    regions, count = ndimage.label(grey >= part * grey.max(), np.ones((3, 3)))
    most = int(np.argmax(ndimage.sum(grey, regions, range(1, count + 1)))) + 1
    (ys, xs), (rows, columns) = np.nonzero(regions == most), grey.shape
    return xs.min() / columns, ys.min() / rows, (xs.max() + 1) / columns, (ys.max() + 1) / rows
