"""Count intervals against sums of probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psc_core.errors import UsageError
from psc_core.metrics import (
    CountInterval,
    beta_binomial_acceptance,
    binomial_acceptance,
    binomial_interval,
    calibrated_rate,
    in_practice,
    weighted_interval,
    weighted_median,
)
from tests.reference import metrics as naive

LEVELS = st.sampled_from([0.5, 0.9, 0.99])


def check_central(interval: CountInterval, mass: list[float], level: float) -> None:
    """Both tails are at most (1 − level) / 2, and neither end can move inwards."""
    low, high, tail = *interval, (1 - level) / 2
    assert math.fsum(mass[:low]) <= tail + 1e-9 and math.fsum(mass[high + 1 :]) <= tail + 1e-9
    assert math.fsum(mass[: low + 1]) > tail - 1e-9 and math.fsum(mass[high:]) > tail - 1e-9


@given(st.integers(1, 300), st.floats(0, 1), LEVELS)
@example(1, 0.0, 0.99)
@example(1, 1.0, 0.99)
@example(10_000, 0.05, 0.99)
def test_binomial_interval_leaves_equal_tails(trials: int, fraction: float, level: float) -> None:
    successes, tail = round(fraction * trials), (1 - level) / 2
    low, high = binomial_interval(successes, trials, level=level)
    assert (low == 0) == (successes == 0) and (high == 1) == (successes == trials)
    if low > 0:
        assert math.fsum(naive.binomial_mass(trials, low)[successes:]) == pytest.approx(tail, rel=1e-6)
    if high < 1:
        assert math.fsum(naive.binomial_mass(trials, high)[: successes + 1]) == pytest.approx(tail, rel=1e-6)


@given(st.integers(1, 2000), st.floats(1e-4, 1 - 1e-4), LEVELS)
@example(10_000, 0.05, 0.99)
def test_binomial_acceptance_is_central(trials: int, alpha: float, level: float) -> None:
    check_central(binomial_acceptance(trials, alpha, level=level), naive.binomial_mass(trials, alpha), level)


@given(st.integers(1, 2000), st.integers(19, 5000), LEVELS)
@example(10_000, 4000, 0.99)
def test_beta_binomial_acceptance_is_central(trials: int, calibration: int, level: float) -> None:
    rank = int(0.05 * (calibration + 1) + 1e-9)
    mass = naive.beta_binomial_mass(trials, rank, calibration + 1 - rank)
    check_central(beta_binomial_acceptance(trials, 0.05, calibration, level=level), mass, level)


@given(st.integers(1, 2000), st.floats(0.001, 0.999), LEVELS)
@example(500, 0.05, 0.95)
@example(19, 0.05, 0.95)
def test_calibrated_rate_leaves_equal_tails(calibration: int, alpha: float, level: float) -> None:
    """At most x of new images lie beyond the r-th most unusual of c exactly where r or more of c lie beyond x."""
    rank = math.floor(alpha * (calibration + 1) + 1e-9)
    if rank < 1:
        with pytest.raises(UsageError, match="raise alpha"):
            calibrated_rate(alpha, calibration, level=level)
        return
    low, high = calibrated_rate(alpha, calibration, level=level)
    tail = (1 - level) / 2
    assert math.fsum(naive.binomial_mass(calibration, low)[rank:]) == pytest.approx(tail, rel=1e-5)
    assert math.fsum(naive.binomial_mass(calibration, high)[:rank]) == pytest.approx(tail, rel=1e-5)


@pytest.mark.parametrize(("alpha", "calibration"), [(0.05, 500), (0.05, 38), (0.2, 100)])
def test_calibrated_rate_holds_that_of_19_thresholds_in_20(alpha: float, calibration: int) -> None:
    random, draws = np.random.default_rng(0), 4000
    ranks = calibration - math.floor(alpha * (calibration + 1) + 1e-9)
    rates = 1 - np.sort(random.random((draws, calibration)), axis=1)[:, ranks]  # scores are uniform
    low, high = calibrated_rate(alpha, calibration)
    for outside in ((rates < low).mean(), (rates > high).mean()):
        assert outside == pytest.approx(0.025, abs=4 * math.sqrt(0.025 * 0.975 / draws))


def test_the_range_is_said_in_per_cent() -> None:
    assert "with 500 of them" in in_practice(0.05, 500)
    assert in_practice(0.05, 500).endswith("3.3 to 7.1")  # quantiles of Beta(25, 476)


def test_an_alpha_within_rounding_of_one() -> None:
    low, high = calibrated_rate(1 - 1e-12, 100)
    assert 0.9 < low < high <= 1 and beta_binomial_acceptance(50, 1 - 1e-12, 100).high == 50


@given(st.integers(1, 200), st.floats(0, 1), st.floats(0.01, 0.99))
def test_interval_and_acceptance_agree(trials: int, fraction: float, rate: float) -> None:
    count = round(fraction * trials)
    low, high = binomial_interval(count, trials)
    accepted = binomial_acceptance(trials, rate)
    if min(abs(low - rate), abs(high - rate)) > 1e-9:
        assert (low < rate < high) == (accepted.low <= count <= accepted.high)


def test_small_calibration_sets_widen_the_interval() -> None:
    exact = binomial_acceptance(1000, 0.05)
    few = beta_binomial_acceptance(1000, 0.05, 199)
    many = beta_binomial_acceptance(1000, 0.05, 10_000_000 - 1)
    assert few.low < exact.low and few.high > exact.high
    assert many == exact
    assert exact.low <= 50 <= exact.high


def test_rejects_too_few_calibration_images() -> None:
    with pytest.raises(UsageError, match=r"alpha ≥ 1/20.*calibrate on more images or raise alpha"):
        beta_binomial_acceptance(100, 0.01, 19)
    beta_binomial_acceptance(100, 0.05, 19)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([1.0, 7.0]), LEVELS)
def test_equal_weights_give_the_binomial_interval(hits: list[bool], weight: float, level: float) -> None:
    found = weighted_interval(hits, np.full(len(hits), weight), level=level)
    assert found == pytest.approx(binomial_interval(sum(hits), len(hits), level=level), abs=1e-9)


def test_weighted_interval_holds_the_rate_of_the_population() -> None:
    random, held, naive_held = np.random.default_rng(0), 0, 0
    for _ in range(400):
        hits = random.random(3000) < 0.1
        probability = np.where(random.random(3000) < 0.5, 0.02, 0.2) * np.where(hits, 0.5, 1.0)
        drawn = random.random(3000) < probability
        low, high = weighted_interval(hits[drawn], 1 / probability[drawn], level=0.95)
        held += low <= 0.1 <= high
        low, high = binomial_interval(int(hits[drawn].sum()), int(drawn.sum()), level=0.95)
        naive_held += low <= 0.1 <= high
    assert held / 400 > 0.93 and naive_held / 400 < 0.5


@given(st.lists(st.tuples(st.integers(-5, 5), st.sampled_from([1.0, 2.0, 10.0, 64.0])), min_size=1, max_size=30))
def test_weighted_median_has_half_of_the_weight_at_or_below_it(members: list[tuple[int, float]]) -> None:
    values, weights = (np.array(column, np.float64) for column in zip(*members, strict=True))
    assert weighted_median(values, weights) == naive.weighted_median(values.tolist(), weights.tolist())
