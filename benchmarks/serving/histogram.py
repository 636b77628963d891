"""Quantiles of latencies, and logarithmic bins with the same edges for every server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

FIRST_MS, PER_DECADE = 0.1, 20
"""Lower edge of bin 0, which also counts smaller latencies, and bins to a factor of ten."""


def bin_of(ms: float) -> int:
    """The bin of a latency, milliseconds."""
    return max(0, math.floor(PER_DECADE * math.log10(max(ms, FIRST_MS) / FIRST_MS) + 1e-9))


def lower_edge(index: int) -> float:
    """Of a bin, milliseconds."""
    return FIRST_MS * 10 ** (index / PER_DECADE)


def histogram(latencies_ms: Iterable[float]) -> dict[str, int]:
    """Counts of the non-empty bins by index, as text for JSON."""
    return {str(index): count for index, count in sorted(Counter(map(bin_of, latencies_ms)).items())}


def quantile(ordered: Sequence[float], q: float) -> float:
    """q-quantile of ascending values; infinite for none."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("inf")


def survival(counts: Mapping[str, int]) -> tuple[list[float], list[float]]:
    """Upper edges of the bins, milliseconds, and the fraction of responses that took longer."""
    total, left = sum(counts.values()), sum(counts.values())
    edges, fractions = [], []
    for index, count in sorted((int(key), count) for key, count in counts.items()):
        left -= count
        edges.append(lower_edge(index + 1))
        fractions.append(left / total)
    return edges, fractions
