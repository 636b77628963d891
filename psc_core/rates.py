"""Rates between 0 and 1, and the ranks that they correspond to among n images."""

from __future__ import annotations

import math
from typing import Final

from psc_core.errors import UsageError

RANK_ROUNDING: Final = 1e-9
"""Added before ⌊ ⌋ and subtracted before ⌈ ⌉, so that 0.29 × 100 counts as 29 in spite of rounding."""


def ood_rank(alpha: float, n: int) -> int:
    """Return the largest k with p-value k/(n + 1) ≤ ``alpha`` for n calibration images, or 0 if no k ≥ 1 has it."""
    return math.floor(alpha * (n + 1) + RANK_ROUNDING)


def conformal_rank(coverage: float, n: int) -> int:
    """Return ``⌈(n + 1) · coverage⌉``, the rank of the conformal quantile among n ascending scores; n + 1 is beyond."""
    return max(1, tolerant_ceil((n + 1) * coverage))  # The tolerance alone would give a tiny coverage rank 0.


def tolerant_ceil(value: float) -> int:
    """Return ``⌈value⌉``, ignoring an excess of up to :data:`RANK_ROUNDING`."""
    return math.ceil(value - RANK_ROUNDING)


def check_fraction(value: float, name: str) -> None:
    """Raise :class:`UsageError` unless the value lies in (0, 1)."""
    if not 0.0 < value < 1.0:
        raise UsageError(f"expected {name} between 0 and 1, got {value}; 0.05 means five in a hundred")
