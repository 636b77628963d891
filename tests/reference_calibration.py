"""Naive twins of :mod:`psc_core.calibration`: counting loops and exact fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def p_value(calibration: Sequence[float], score: float) -> Fraction:
    """``(1 + #{calibration ≤ score}) / (n + 1)``."""
    return Fraction(1 + sum(other <= score for other in calibration), len(calibration) + 1)


def prediction_set(
    true_probabilities: Sequence[float], probabilities: Sequence[float], coverage: Fraction
) -> set[int]:
    """Marginal set by scores ``1 − p`` as they are defined, with exact numbers; the top class added."""
    scores = sorted(1 - Fraction(p) for p in true_probabilities)
    k = math.ceil((len(scores) + 1) * coverage)
    limit = scores[k - 1] if k <= len(scores) else Fraction(1)
    chosen = {c for c, p in enumerate(probabilities) if 1 - Fraction(p) <= limit}
    return chosen | {max(range(len(probabilities)), key=lambda c: probabilities[c])}
