"""Exact intervals for counts: is a realised rate compatible with the promised one?

Three questions, all answered with central intervals (each tail ≤ (1 − level)/2) and nothing but sums of
probabilities in float64:

* :func:`binomial_interval`: which rates explain k of n?  Clopper–Pearson.
* :func:`binomial_acceptance`: which counts k of n does a fixed rate α explain?
* :func:`beta_binomial_acceptance`: which counts does a *calibrated* threshold explain?  A conformal p-value
  is ≤ α exactly below the r-th smallest of c calibration scores, r = ⌊α (c + 1)⌋; the true rate below it is
  random over calibration sets, Beta(r, c + 1 − r), so the count is beta-binomial (Vovk 2012).  For finite c
  this is wider than the binomial interval, by the noise that the calibration set itself has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import UsageError

_BISECTIONS = 60


class RateInterval(NamedTuple):
    """Closed interval of rates."""

    low: float
    high: float


class CountInterval(NamedTuple):
    """Closed interval of counts."""

    low: int
    high: int

    def __contains__(self, count: object) -> bool:
        return isinstance(count, int) and self.low <= count <= self.high


def binomial_interval(successes: int, trials: int, *, level: float = 0.99) -> RateInterval:
    """Clopper–Pearson interval of the rate behind ``successes`` of ``trials``."""
    _check(trials, level)
    if not 0 <= successes <= trials:
        raise UsageError(f"expected 0 ≤ successes ≤ {trials}, got {successes}")
    tail = (1 - level) / 2
    ways = _log_ways(trials)

    def solve(first: int, last: int, target: float, *, rising: bool) -> float:
        """The p at which P(first ≤ X ≤ last) = target, monotone in p."""
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            p = (low + high) / 2
            mass = float(_binomial(ways, p)[first : last + 1].sum())
            low, high = (p, high) if (mass < target) == rising else (low, p)
        return (low + high) / 2

    lower = 0.0 if successes == 0 else solve(successes, trials, tail, rising=True)
    upper = 1.0 if successes == trials else solve(0, successes, tail, rising=False)
    return RateInterval(lower, upper)


def binomial_acceptance(trials: int, alpha: float, *, level: float = 0.99) -> CountInterval:
    """Counts that ``trials`` draws at rate ``alpha`` give with probability ≥ ``level``."""
    _check(trials, level)
    _check_alpha(alpha)
    return _central(_binomial(_log_ways(trials), alpha), level)


def beta_binomial_acceptance(trials: int, alpha: float, calibration_size: int, *, level: float = 0.99) -> CountInterval:
    """Counts that p ≤ ``alpha`` gives over ``trials`` when p comes from ``calibration_size`` scores.

    Raises:
        UsageError: α < 1/(c + 1), for which no p-value is ever small enough.
    """
    _check(trials, level)
    _check_alpha(alpha)
    rank = int(alpha * (calibration_size + 1) + 1e-9)
    if rank < 1:
        raise UsageError(
            f"expected alpha ≥ 1/{calibration_size + 1}, the smallest p-value {calibration_size} "
            f"calibration images can give, got {alpha}; calibrate on more images or raise alpha"
        )
    a, b = float(rank), float(calibration_size + 1 - rank)
    k = torch.arange(trials + 1, dtype=torch.float64)
    log_mass = _log_ways(trials) + _log_beta(k + a, trials - k + b) - _log_beta(torch.tensor(a), torch.tensor(b))
    return _central(log_mass.exp(), level)


def _check(trials: int, level: float) -> None:
    if trials < 1:
        raise UsageError(f"expected at least one trial, got {trials}")
    if not 0 < level < 1:
        raise UsageError(f"expected a level between 0 and 1, got {level}")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise UsageError(f"expected alpha between 0 and 1, got {alpha}")


def _log_ways(n: int) -> Float[Tensor, " counts"]:
    """log C(n, k) for k = 0…n."""
    k = torch.arange(n + 1, dtype=torch.float64)
    return torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64)) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _binomial(log_ways: Tensor, p: float) -> Float[Tensor, " counts"]:
    """P(X = k) for k = 0…n and 0 < p < 1."""
    k = torch.arange(len(log_ways), dtype=torch.float64)
    rate = torch.tensor(p, dtype=torch.float64)
    return (log_ways + k * rate.log() + (len(log_ways) - 1 - k) * torch.log1p(-rate)).exp()


def _central(mass: Tensor, level: float) -> CountInterval:
    """Smallest low, high with P(X < low) and P(X > high) ≤ (1 − level)/2."""
    tail = (1 - level) / 2
    below, above = mass.cumsum(0), mass.flip(0).cumsum(0).flip(0)
    low = int((below <= tail).sum())
    high = len(mass) - 1 - int((above <= tail).sum())
    return CountInterval(low, high)
