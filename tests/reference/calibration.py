"""Naive twins of :mod:`psc_core.calibration`: counting loops and exact fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor


def p_value(calibration: Sequence[float], score: float) -> Fraction:
    """``(1 + #{calibration ≤ score}) / (n + 1)``."""
    return Fraction(1 + sum(other <= score for other in calibration), len(calibration) + 1)


def prediction_set(true_probabilities: Sequence[float], probabilities: Sequence[float], coverage: Fraction) -> set[int]:
    """Marginal set by scores ``1 − p`` by their definition, with exact fractions; the most probable class is added."""
    scores = sorted(1 - Fraction(p) for p in true_probabilities)
    k = math.ceil((len(scores) + 1) * coverage)
    limit = scores[k - 1] if k <= len(scores) else Fraction(1)
    chosen = {c for c, p in enumerate(probabilities) if 1 - Fraction(p) <= limit}
    return chosen | {max(range(len(probabilities)), key=lambda c: probabilities[c])}


def ambiguity_threshold(entropy: Tensor, correct: Tensor, risk: float, quantile: float) -> float:
    """Every entropy tried as the threshold, by counting."""
    values = entropy.double().tolist()
    right = correct.tolist()
    count = len(values)
    limit = sorted(values)[min(count, math.ceil((count + 1) * quantile - 1e-9)) - 1]
    best = None
    for h in values:
        accepted = [ok for value, ok in zip(values, right, strict=True) if value <= h]
        if (accepted.count(False) + 1) / (len(accepted) + 1) <= risk and (best is None or h > best):
            best = h
    return limit if best is None else min(limit, best)
