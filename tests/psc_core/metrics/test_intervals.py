"""Count intervals against scipy."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from psc_core.errors import UsageError
from psc_core.metrics.intervals import beta_binomial_acceptance, binomial_acceptance, binomial_interval

LEVELS = st.sampled_from([0.5, 0.9, 0.99])


@given(st.integers(1, 300), st.floats(0, 1), LEVELS)
@example(1, 0.0, 0.99)
@example(1, 1.0, 0.99)
@example(10_000, 0.05, 0.99)
def test_clopper_pearson(trials: int, share: float, level: float) -> None:
    successes = round(share * trials)
    expected = stats.binomtest(successes, trials).proportion_ci(level, "exact")
    assert binomial_interval(successes, trials, level=level) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(st.integers(1, 2000), st.floats(1e-4, 1 - 1e-4), LEVELS)
@example(10_000, 0.05, 0.99)
def test_binomial_acceptance(trials: int, alpha: float, level: float) -> None:
    low, high = binomial_acceptance(trials, alpha, level=level)
    exact, tail = stats.binom(trials, alpha), (1 - level) / 2
    assert exact.cdf(low - 1) <= tail + 1e-10 and exact.sf(high) <= tail + 1e-10
    assert exact.cdf(low) > tail - 1e-10 and exact.sf(high - 1) > tail - 1e-10


@given(st.integers(1, 2000), st.integers(19, 5000), LEVELS)
@example(10_000, 4000, 0.99)
def test_beta_binomial_acceptance(trials: int, calibration: int, level: float) -> None:
    low, high = beta_binomial_acceptance(trials, 0.05, calibration, level=level)
    rank = int(0.05 * (calibration + 1) + 1e-9)
    exact, tail = stats.betabinom(trials, rank, calibration + 1 - rank), (1 - level) / 2
    assert exact.cdf(low - 1) <= tail + 1e-7 and exact.sf(high) <= tail + 1e-7
    assert exact.cdf(low) > tail - 1e-7 and exact.sf(high - 1) > tail - 1e-7


@given(st.integers(1, 200), st.floats(0, 1), st.floats(0.01, 0.99))
def test_a_rate_explains_a_count_exactly_when_the_count_is_acceptable(trials: int, share: float, rate: float) -> None:
    count = round(share * trials)
    low, high = binomial_interval(count, trials)
    if min(abs(low - rate), abs(high - rate)) > 1e-9:
        assert (low < rate < high) == (count in binomial_acceptance(trials, rate))


def test_finite_calibration_widens_the_interval_and_vanishes_in_the_limit() -> None:
    exact = binomial_acceptance(1000, 0.05)
    few = beta_binomial_acceptance(1000, 0.05, 199)
    many = beta_binomial_acceptance(1000, 0.05, 10_000_000 - 1)
    assert few.low < exact.low and few.high > exact.high
    assert many == exact
    assert 50 in exact and exact.high + 1 not in exact


def test_too_few_calibration_images_are_refused() -> None:
    with pytest.raises(UsageError, match=r"alpha ≥ 1/20.*calibrate on more images or raise alpha"):
        beta_binomial_acceptance(100, 0.01, 19)
    beta_binomial_acceptance(100, 0.05, 19)


@pytest.mark.parametrize(
    "call",
    [
        lambda: binomial_interval(2, 1),
        lambda: binomial_interval(0, 0),
        lambda: binomial_interval(0, 1, level=1.0),
        lambda: binomial_acceptance(10, 0.0),
    ],
)
def test_impossible_arguments(call: object) -> None:
    with pytest.raises(UsageError):
        call()  # type: ignore[operator]
