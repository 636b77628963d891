"""Naive twins of :mod:`psc_core.checks`: one image and one check at a time, in float64."""

import math
from collections.abc import Sequence


def log_p_value(in_distribution: Sequence[float], scale: float, value: float) -> float:
    """Logarithm of the p-value: linear between neighbours, an exponential tail beyond the largest."""
    ordered, n = sorted(in_distribution), len(in_distribution)
    at = [math.log((n - i) / (n + 1)) for i in range(n)]
    if value >= ordered[-1]:
        return -math.log(n + 1) - (value - ordered[-1]) / scale
    if value < ordered[0]:
        return at[0]
    i = max(i for i in range(n) if ordered[i] <= value)
    return at[i] + (at[i + 1] - at[i]) * (value - ordered[i]) / (ordered[i + 1] - ordered[i])


def tail_scale(in_distribution: Sequence[float], fraction: float, minimum: int) -> float:
    """Mean excess of the largest values over the one below them, at least a thousandth of the range."""
    ordered, n = sorted(in_distribution), len(in_distribution)
    k = max(1, min(n - 1, max(minimum, round(fraction * n))))
    return max(tail_excess(ordered, k), (ordered[-1] - ordered[0]) / 1000)


def tail_excess(ordered: Sequence[float], k: int) -> float:
    """Mean excess of the k largest values over the one below them, or the smallest where there is none."""
    threshold = ordered[-k - 1] if len(ordered) > k else ordered[0]
    return math.fsum(value - threshold for value in ordered[-k:]) / k


def score(log_p: Sequence[float], below: Sequence[float]) -> float:
    """Minus the log p-values of one image, of each check only what lies below its limit."""
    return -math.fsum(min(0.0, value - math.log(limit)) for value, limit in zip(log_p, below, strict=True))
