"""Naive twins of :mod:`psc_core.maps`: one vector, one position and one level at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def thresholds(values: Sequence[float], levels: int, decades: int, tail: float) -> list[float]:
    """The value that a fraction 10^(−decades · g / levels) reaches, for g = 1, 2, …"""
    ordered, m = sorted(values), len(values)
    log_t = [math.log((m - i) / (m + 1)) for i in range(m)]
    k = max(1, round(tail * m))
    excess = tail_excess(ordered, k)
    found = []
    for g in range(1, levels + 1):
        wanted = -decades * math.log(10) * g / levels
        if wanted <= log_t[-1]:
            found.append(ordered[-1] + (log_t[-1] - wanted) * excess)
        elif wanted >= log_t[0]:
            found.append(ordered[0])
        else:
            i = max(i for i in range(m) if log_t[i] >= wanted)
            part = (log_t[i] - wanted) / (log_t[i] - log_t[i + 1])
            found.append(ordered[i] + part * (ordered[i + 1] - ordered[i]))
    return found


def box(grey: Sequence[Sequence[int]]) -> tuple[float, float, float, float]:
    """The box of the region of the largest sum, by flooding."""
    rows, columns = len(grey), len(grey[0])
    brightest = max(map(max, grey))
    left = {(y, x) for y in range(rows) for x in range(columns) if 2 * grey[y][x] >= brightest}
    regions: list[list[tuple[int, int]]] = []
    for start in sorted(left):
        if start not in left:
            continue
        region, todo = [], [start]
        left.discard(start)
        while todo:
            y, x = todo.pop()
            region.append((y, x))
            for near in [(y + j, x + i) for j in (-1, 0, 1) for i in (-1, 0, 1)]:
                if near in left:
                    left.discard(near)
                    todo.append(near)
        regions.append(region)
    strangest = max(regions, key=lambda region: sum(grey[y][x] for y, x in region))
    ys, xs = [y for y, _ in strangest], [x for _, x in strangest]
    return min(xs) / columns, min(ys) / rows, (max(xs) + 1) / columns, (max(ys) + 1) / rows
