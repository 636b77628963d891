"""Naive twins of conformal calibration: counting loops and exact fractions."""

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


def ambiguity_threshold(
    entropy: Tensor, correct: Tensor, risk: float, quantile: float, *, confidence: float, first: int
) -> float | None:
    """Every entropy in turn, by summing binomial probabilities at ``risk``."""
    images = list(zip(entropy.double().tolist(), correct.tolist(), strict=True))
    best, largest = None, math.ceil((len(images) + 1) * quantile - 1e-9)
    for threshold in sorted({value for value, _ in images}):
        accepted = [right for value, right in images if value <= threshold]
        below = sum(value < threshold for value, _ in images)
        if len(accepted) < first or (len(accepted) > largest and below >= min(first, largest)):
            continue
        n, errors = len(accepted) - 1, accepted.count(False)
        # The bound is at most ``risk`` exactly where so few errors have a probability of at most 1 − confidence.
        tail = math.fsum(math.comb(n, k) * risk**k * (1 - risk) ** (n - k) for k in range(errors + 1))
        if errors >= n or tail > 1 - confidence:
            return best
        best = threshold
    return best


def weighted_p_value(scores: Sequence[float], weights: Sequence[Fraction], score: float) -> Fraction:
    """``(w* + Σ of the weights of scores ≥ this one) / (w* + Σ of all weights)``, w* the largest weight."""
    above = sum((w for s, w in zip(scores, weights, strict=True) if s >= score), Fraction(0))
    return (max(weights) + above) / (max(weights) + sum(weights))
