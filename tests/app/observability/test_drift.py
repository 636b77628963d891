"""The drift monitor: its false-alarm bound, its speed, and the binomial tail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from app.drift import EXPONENTS, QUIET, DriftMonitor, window_tail

DELTA = 0.1


def monitor_of(
    calibration_count: int, alpha: float, *, false_alarm_probability: float = 0.01, window: int = 1000
) -> DriftMonitor:
    return DriftMonitor(calibration_count, alpha, false_alarm_probability=false_alarm_probability, window=window)


def served_p_values(calibration: npt.NDArray[np.float64], scores: npt.NDArray[np.float64]) -> list[float]:
    """p-values as the service gives them: float32, against one fixed calibration set."""
    below = np.searchsorted(np.sort(calibration), scores, side="right")
    return [float(value) for value in ((1.0 + below) / (1.0 + len(calibration))).astype(np.float32)]


def asleep(k: int) -> float:
    """The capital that has not begun to bet after k images."""
    return math.log(10) / math.log(k + 10)


def naive_log_values(n: int, p_values: Iterable[float]) -> list[float]:
    """The martingale from its definition: every start, every ε, one product each; no restart."""
    earlier: list[int] = []
    online: list[float] = []
    values: list[float] = []
    for p_value in p_values:
        cell = round(p_value * (n + 1)) - 1
        q = (1 + cell + sum(c <= cell for c in earlier)) / (n + 1 + len(earlier))
        online.append(max(q, (1 + cell) / (n + 1)))
        earlier.append(cell)
        t = len(online)
        value = asleep(t)
        for start in range(1, t + 1):
            weight = asleep(start - 1) - asleep(start)
            for epsilon in EXPONENTS:
                bets = [epsilon * q ** (epsilon - 1) for q in online[start - 1 :]]
                value += weight / len(EXPONENTS) * math.prod(bets)
        values.append(math.log(value))
    return values


@given(n=st.integers(1, 30), ranks=st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_equals_the_definition(n: int, ranks: list[float]) -> None:
    p_values = [(1 + round(rank * n)) / (n + 1) for rank in ranks]
    monitor = monitor_of(n, 0.05, false_alarm_probability=1e-200)
    for p_value, expected in zip(p_values, naive_log_values(n, p_values), strict=True):
        monitor.update([p_value])
        assert monitor.state.log_martingale == pytest.approx(expected, abs=1e-9)


@given(
    n=st.integers(1, 300),
    window=st.integers(1, 400),
    fractions=st.lists(st.sampled_from([0.0, 1e-3, 0.01, 0.5, 1.0]), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_many_images_at_once_equal_one_by_one(n: int, window: int, fractions: list[float], seed: int) -> None:
    """Streams of four stretches, each with its own fraction of strange images, so that alarms fall anywhere."""
    generator = np.random.default_rng(seed)
    strange = generator.random(600) < np.repeat(fractions, 150)
    p_values = np.where(strange, 1, generator.integers(1, n + 2, 600)) / (n + 1)
    at_once, one_by_one = (monitor_of(n, 0.2, window=window) for _ in range(2))
    assert at_once.update(p_values) == sum(one_by_one.update([p_value]) for p_value in p_values)
    assert dataclasses.astuple(at_once.state) == pytest.approx(dataclasses.astuple(one_by_one.state), abs=1e-9)
    flags = (np.rint(p_values[-window:] * (n + 1)) <= math.floor(0.2 * (n + 1) + 1e-9)).tolist()
    assert at_once.state.window_ood_rate == pytest.approx(sum(flags) / len(flags))


@pytest.mark.parametrize("ties", [False, True])
def test_false_alarms_stay_below_the_bound_with_one_fixed_calibration_set(ties: bool) -> None:
    """Streams 20 times as long as the calibration set, where betting on served p-values fails."""
    generator = np.random.default_rng(1)
    runs, n, length = 200, 50, 1000
    alarmed = 0
    for _ in range(runs):
        scores = generator.normal(size=n + length)
        if ties:
            scores = np.round(scores, 1)
        monitor = monitor_of(n, 0.05, false_alarm_probability=DELTA)
        monitor.update(served_p_values(scores[:n], scores[n:]))
        alarmed += monitor.state.alarms > 0
    assert alarmed / runs <= DELTA + 2 * math.sqrt(DELTA * (1 - DELTA) / runs)


def test_false_alarms_of_a_fleet_stay_below_the_bound_that_its_monitors_share() -> None:
    """Replicas, restarts and reloads begin monitors that share one calibration set."""
    generator = np.random.default_rng(3)
    fleets, monitors, n, length = 40, 20, 200, 500
    sharing = alone = 0
    for _ in range(fleets):
        calibration = generator.normal(size=n)
        streams = [served_p_values(calibration, generator.normal(size=length)) for _ in range(monitors)]
        sharing += any(monitor_of(n, 0.05, false_alarm_probability=DELTA / monitors).update(each) for each in streams)
        alone += any(monitor_of(n, 0.05, false_alarm_probability=DELTA).update(each) for each in streams)
    assert sharing / fleets <= DELTA
    assert alone > sharing


@pytest.mark.parametrize("quiet", [0, 20_000])
@pytest.mark.parametrize(("shift", "within"), [(-6.0, 15), (-2.0, 60), (-0.7, 500)])
def test_drift_is_found_soon_early_or_late(quiet: int, shift: float, within: int) -> None:
    generator = np.random.default_rng(2)
    n = 2000
    calibration = generator.normal(size=n)
    monitor = monitor_of(n, 0.05)
    monitor.update(served_p_values(calibration, generator.normal(size=quiet)))
    assert monitor.state.alarms == 0
    drifted = served_p_values(calibration, generator.normal(loc=shift, size=within))
    found = next((i for i, p in enumerate(drifted) if monitor.update([p])), None)
    assert found is not None


def test_images_that_raised_alarms_do_not_become_usual() -> None:
    """Nobody can blind the monitor by sending it what it is to find."""
    generator = np.random.default_rng(4)
    n = 1000
    calibration = generator.normal(size=n)
    monitor = monitor_of(n, 0.05)
    assert monitor.update([1 / (n + 1)] * 5000) == 1
    assert monitor.update(served_p_values(calibration, generator.normal(size=5000))) == 0
    assert not monitor.state.is_active
    assert monitor.update([1 / (n + 1)] * 10) == 1


@pytest.mark.parametrize(("mean", "fraction"), [(-8.0, 0.05), (-8.0, 0.2), (-0.5, 1.0)])
def test_lasting_drift_is_one_alarm_and_ends_when_it_ends(mean: float, fraction: float) -> None:
    """Ordinary images, 10,000 with drift, ordinary ones, and the drift again."""
    n = 2000
    for seed in range(5):
        generator = np.random.default_rng(seed)
        calibration = generator.normal(size=n)
        monitor = monitor_of(n, 0.05, false_alarm_probability=1e-4)

        def stream(size: int, moved: float) -> list[float]:
            scores = generator.normal(size=size) + mean * (generator.random(size) < moved)  # noqa: B023
            return served_p_values(calibration, scores)  # noqa: B023

        assert monitor.update(stream(5000, 0.0)) == 0
        for episode in (1, 2):
            monitor.update(stream(10_000, fraction))
            assert (monitor.state.alarms, monitor.state.is_active) == (episode, True)
            assert monitor.update(stream(4000, 0.0)) == 0
            assert not monitor.state.is_active


def test_an_episode_ends_within_two_windows_of_most_streams() -> None:
    generator = np.random.default_rng(6)
    n, window, streams, ended = 500, 300, 200, 0
    for _ in range(streams):
        calibration = generator.normal(size=n)
        monitor = monitor_of(n, 0.05, window=window)
        monitor.update([1 / (n + 1)] * 50)
        assert monitor.state.is_active
        monitor.update(served_p_values(calibration, generator.normal(size=2 * window)))
        ended += not monitor.state.is_active
    assert ended / streams >= 1 - 2 * QUIET - 2 * math.sqrt(2 * QUIET / streams)


def test_an_episode_lasts_while_the_window_has_too_many_far_images() -> None:
    """The martingale gets used to far images when there are few calibration images; the window does not."""
    monitor = monitor_of(100, 0.05, window=1000)
    generator = np.random.default_rng(8)
    assert monitor.update([1 / 101] * 50) == 1
    assert monitor.update(np.where(generator.random(10_000) < 0.2, 1, generator.integers(1, 102, 10_000)) / 101) == 0
    assert monitor.state.is_active


def test_the_alarm_begins_a_run_without_memory() -> None:
    monitor = monitor_of(1000, 0.05)
    raised = [monitor.update([1 / 1001]) for _ in range(60)]
    first = raised.index(1)
    assert first < 10
    assert sum(raised) == monitor.state.alarms == 1
    again = monitor_of(1000, 0.05)
    again.update([1 / 1001] * (first + 1))
    assert again.state.log_martingale == 0.0


def test_the_window_counts_only_its_images() -> None:
    monitor = monitor_of(19, 0.05, window=4)
    assert monitor.state.window_ood_rate == 0.0
    assert monitor.state.window_tail_probability == 1.0
    monitor.update([float(np.float32(0.05)), 0.1, 1.0])  # float32(0.05) > 0.05, and still p ≤ alpha
    assert monitor.state.window_ood_rate == pytest.approx(1 / 3)
    monitor.update([1.0, 1.0, 0.05])
    assert monitor.state.window_ood_rate == 0.25
    assert monitor.state.window_tail_probability == pytest.approx(stats.betabinom.sf(0, 4, 1, 19))


@pytest.mark.parametrize(
    ("n", "alpha", "p_value", "same"),
    [(99, 0.29, 0.29, 0.29), (9, 0.2, 1e-9, 0.1)],  # 0.29 × 100 < 29 in float64; below the smallest of the calibration
)
def test_a_p_value_at_the_edge_flags(n: int, alpha: float, p_value: float, same: float) -> None:
    monitor, other = monitor_of(n, alpha), monitor_of(n, alpha)
    monitor.update([p_value])
    other.update([same])
    assert monitor.state == other.state and monitor.state.window_ood_rate == 1.0


@given(st.integers(0, 400), st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_window_tail_equals_scipy(ood: int, images: int, rank: int, n: int) -> None:
    ood, rank = min(ood, images), min(rank, n)
    expected = stats.hypergeom.cdf(rank - 1, n + images, n, rank + ood - 1) if ood else 1.0
    assert window_tail(ood, images, rank, n) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    beta_binomial = stats.betabinom.sf(ood - 1, images, rank, n + 1 - rank)
    assert window_tail(ood, images, rank, n) == pytest.approx(beta_binomial, abs=1e-9)


def test_window_tail_of_a_long_window() -> None:
    assert window_tail(50_400, 10**6, 200, 3999) == pytest.approx(
        stats.betabinom.sf(50_399, 10**6, 200, 3800), rel=1e-7
    )


def test_windows_of_ordinary_images_have_tails_as_they_say() -> None:
    """With few calibration images the rate is far from alpha in many windows, and not unlikely."""
    generator = np.random.default_rng(9)
    tails = []
    for _ in range(1000):
        monitor = monitor_of(60, 0.05, window=400, false_alarm_probability=1e-9)
        monitor.update(served_p_values(generator.normal(size=60), generator.normal(size=400)))
        tails.append(monitor.state.window_tail_probability)
    for level in (0.5, 0.1, 0.01):
        assert np.mean(np.array(tails) <= level) <= level + 3 * math.sqrt(level / 1000)


@pytest.mark.parametrize("p_value", [0.0, -0.1, 1.1, math.nan, math.inf])
def test_rejects_what_is_no_p_value(p_value: float) -> None:
    monitor = monitor_of(10, 0.05)
    with pytest.raises(ValueError):
        monitor.update([0.5, p_value])
    before = monitor_of(10, 0.05)
    before.update([0.5])
    assert monitor.state == before.state
