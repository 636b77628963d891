"""Exact intervals for counts, which tell whether an observed rate is compatible with the nominal rate.

Four questions, each answered with a central interval (each tail at most (1 − level) / 2) by :mod:`scipy.stats`:

* :func:`binomial_interval`: which rates explain k of n?  Clopper–Pearson.
* :func:`weighted_interval`: the same for a sample whose members were drawn with different probabilities.
  Clopper–Pearson with the counts of an unweighted sample of the same precision (Korn and Graubard 1998).
  :func:`weighted_median` is the median of numbers in such a population.
* :func:`binomial_acceptance`: which counts k of n does a fixed rate α explain?
* :func:`beta_binomial_acceptance`: which counts does a *calibrated* threshold explain?  A conformal p-value
  is ≤ α exactly below the r-th smallest of c calibration scores, r = ⌊α (c + 1)⌋; the true rate below it is
  random over calibration sets, Beta(r, c + 1 − r), so the count is beta-binomial (Vovk 2012).  For finite c
  this is wider than the binomial interval, because the calibration set itself is a sample.
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


def beta_binomial_acceptance(trials: int, alpha: float, calibration_size: int, *, level: float = 0.99) -> CountInterval:
    """Return the counts of p ≤ ``alpha`` among ``trials`` if p comes from ``calibration_size`` scores.

    Raises:
        UsageError: If α < 1/(c + 1), because then no p-value is small enough.
    """
    rank = ood_rank(alpha, calibration_size)
    if rank < 1:
        raise UsageError(
            f"expected alpha ≥ 1/{calibration_size + 1}, the smallest p-value {calibration_size} "
            f"calibration images can give, got {alpha}; calibrate on more images or raise alpha"
        )
    return CountInterval(*map(int, stats.betabinom(trials, rank, calibration_size + 1 - rank).interval(level)))
