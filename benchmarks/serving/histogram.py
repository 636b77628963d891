"""Quantiles of latencies, and bins of equal ratio, so that every server's have the same edges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

FIRST_MS, PER_DECADE = 0.1, 20
"""Lower edge of bin 0, and bins to a factor of ten; bin 0 takes what is below it too."""


def bin_of(ms: float) -> int:
    """The bin of a latency, milliseconds."""
    return max(0, math.floor(PER_DECADE * math.log10(max(ms, FIRST_MS) / FIRST_MS) + 1e-9))


def lower_edge(index: int) -> float:
    """Of a bin, milliseconds."""
    return FIRST_MS * 10 ** (index / PER_DECADE)


def histogram(latencies_ms: Iterable[float]) -> dict[str, int]:
    """Counts of the bins that hold any, by the index of the bin as text (JSON's keys are)."""
    return {str(index): count for index, count in sorted(Counter(map(bin_of, latencies_ms)).items())}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values; infinite when there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def survival(counts: Mapping[str, int]) -> tuple[list[float], list[float]]:
    """Upper edges of the bins, milliseconds, and the share of answers that took longer."""
    total, left = sum(counts.values()), sum(counts.values())
    edges, shares = [], []
    for index, count in sorted((int(key), count) for key, count in counts.items()):
        left -= count
        edges.append(lower_edge(index + 1))
        shares.append(left / total)
    return edges, shares
