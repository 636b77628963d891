"""Exact intervals for counts, which tell whether an observed rate is compatible with the nominal rate.

Five questions, each answered with a central interval (each tail at most (1 − level) / 2) by :mod:`scipy.stats`:

* :func:`binomial_interval`: which rates explain k of n?  Clopper–Pearson.
* :func:`weighted_interval`: the same for a sample whose members were drawn with different probabilities.
  Clopper–Pearson with the counts of an unweighted sample of the same precision (Korn and Graubard 1998).
  :func:`weighted_median` is the median of numbers in such a population.
* :func:`binomial_acceptance`: which counts k of n does a fixed rate α explain?
* :func:`calibrated_rate`: which true rates does a *calibrated* threshold have?  A conformal p-value is ≤ α exactly
  beyond the r-th most unusual of c calibration scores, r = ⌊α (c + 1)⌋; the true rate beyond it is random over
  calibration sets, Beta(r, c + 1 − r), with the mean r / (c + 1) ≤ α (Vovk 2012).
* :func:`beta_binomial_acceptance`: which counts does such a threshold explain?  The count is beta-binomial.  For finite
  c this is wider than the binomial interval, because the calibration set itself is a sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from psc_core.errors import UsageError
from psc_core.rates import ood_rank


class RateInterval(NamedTuple):
    """A closed interval of rates."""

    low: float
    high: float


class CountInterval(NamedTuple):
    """A closed interval of counts."""

    low: int
    high: int


def binomial_interval(successes: int, trials: int, *, level: float = 0.99) -> RateInterval:
    """Return the Clopper–Pearson interval of the rate behind ``successes`` of ``trials``."""
    interval = stats.binomtest(successes, trials).proportion_ci(level, "exact")
    return RateInterval(float(interval.low), float(interval.high))


def weighted_interval(hits: npt.ArrayLike, weights: npt.NDArray[np.float64], *, level: float = 0.99) -> RateInterval:
    """Return the interval of the rate of hits in the population from which n members were drawn.

    Args:
        hits: Booleans, (n,).
        weights: The inverse of the probability with which each member was drawn, (n,).
        level: The confidence level.
    """
    size = weights.sum() ** 2 / (weights**2).sum()  # n if all weights are equal
    count = size * float(weights @ np.asarray(hits, np.float64) / weights.sum())
    tail = (1 - level) / 2
    low = stats.beta.ppf(tail, count, size - count + 1) if count > 0 else 0.0
    high = stats.beta.ppf(1 - tail, count + 1, size - count) if count < size else 1.0
    return RateInterval(float(low), float(high))


def weighted_median(values: npt.NDArray[np.floating[Any]], weights: npt.NDArray[np.float64]) -> float:
    """Return the smallest value below or at which half of the weight lies.

    Args:
        values: At least one number, (n,).
        weights: The inverse of the probability with which each was drawn, (n,).
    """
    order = np.argsort(values)
    cumulative = weights[order].cumsum()
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)])


def binomial_acceptance(trials: int, alpha: float, *, level: float = 0.99) -> CountInterval:
    """Return the counts that ``trials`` draws at rate ``alpha`` give with probability ≥ ``level``."""
    return CountInterval(*map(int, stats.binom(trials, alpha).interval(level)))


def calibrated_rate(alpha: float, calibration_size: int, *, level: float = 0.95) -> RateInterval:
    """Return the true rates of p ≤ ``alpha`` that thresholds from ``calibration_size`` scores have.

    Raises:
        UsageError: If α < 1/(c + 1), because then no p-value is small enough.
    """
    low, high = stats.beta(*_beta_of(alpha, calibration_size)).interval(level)
    return RateInterval(float(low), float(high))


def in_practice(alpha: float, calibration_size: int) -> str:
    """Return :func:`calibrated_rate` as a phrase that follows "calibration images" and precedes the per cent sign."""
    low, high = calibrated_rate(alpha, calibration_size)
    return f"in practice, with {calibration_size} of them, {100 * low:.2g} to {100 * high:.2g}"


def beta_binomial_acceptance(trials: int, alpha: float, calibration_size: int, *, level: float = 0.99) -> CountInterval:
    """Return the counts of p ≤ ``alpha`` among ``trials`` if p comes from ``calibration_size`` scores.

    Raises:
        UsageError: If α < 1/(c + 1), because then no p-value is small enough.
    """
    return CountInterval(*map(int, stats.betabinom(trials, *_beta_of(alpha, calibration_size)).interval(level)))


def _beta_of(alpha: float, calibration_size: int) -> tuple[int, int]:
    """Return r and c + 1 − r."""
    rank = ood_rank(alpha, calibration_size)
    if rank < 1:
        raise UsageError(
            f"expected alpha ≥ 1/{calibration_size + 1}, the smallest p-value {calibration_size} "
            f"calibration images can give, got {alpha}; calibrate on more images or raise alpha"
        )
    rank = min(rank, calibration_size)  # alpha within rounding of 1 gives rank c + 1
    return rank, calibration_size + 1 - rank
