from __future__ import annotations

import math
import statistics
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as sklearn_metrics
from sklearn.metrics import r2_score, root_mean_squared_error

from psc_core import metrics
from psc_core.errors import UsageError
from psc_core.metrics import (
    CountInterval,
    beta_binomial_acceptance,
    binomial_acceptance,
    binomial_interval,
    calibrated_rate,
    crps,
    gaussian_nll,
    in_practice,
    r2,
    rises_with,
    rmse,
    weighted_interval,
    weighted_median,
)
from tests.reference import metrics as naive

LEVELS = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 0.9, 1.0])
"""Few distinct values, so ties, all-equal inputs and the ends of [0, 1] are common."""

SCORES = st.one_of(
    st.lists(LEVELS, min_size=1, max_size=25),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=25),
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf]), min_size=1, max_size=8),
)
PREDICTIONS = st.lists(st.tuples(st.one_of(LEVELS, st.floats(0, 1)), st.booleans()), min_size=1, max_size=40)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unzip(predictions: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor([c for c, _ in predictions]), torch.tensor([ok for _, ok in predictions])


def test_rejects_unusable_inputs() -> None:
    with pytest.raises(UsageError, match="at least one value"):
        metrics.auroc(torch.zeros(0), torch.zeros(1))
    with pytest.raises(UsageError, match="NaN"):
        metrics.fpr95(torch.tensor([math.nan]), torch.zeros(1))
    for forecast in (rmse, r2, partial(gaussian_nll, deviation=torch.ones(2)), partial(crps, deviation=torch.ones(2))):
        with pytest.raises(UsageError, match="NaN"):
            forecast(mean=torch.tensor([0.0, math.nan]), values=torch.zeros(2))
    with pytest.raises(UsageError, match="one length, got 2 and 1"):
        metrics.check_same_length("ece", torch.ones(2), torch.ones(1))  # callers' shapes are checked before, in tests


@st.composite
def classified(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (n, K), with zeros and ones, and labels."""
    classes = draw(st.integers(1, 5))
    weights = draw(st.lists(st.lists(LEVELS, min_size=classes, max_size=classes).filter(any), min_size=1, max_size=9))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=len(weights), max_size=len(weights)))
    raw = torch.tensor(weights, dtype=torch.float64)
    return raw / raw.sum(1, keepdim=True), torch.tensor(labels)


@given(classified())
def test_likelihoods_match_loops(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, y = case
    assert metrics.nll(p, y) == pytest.approx(naive.nll(p.tolist(), y.tolist(), metrics.LOG_FLOOR))
    assert float(metrics.label_brier(p, y).mean()) == pytest.approx(naive.brier(p.tolist(), y.tolist()), abs=1e-12)
    assert metrics.accuracy(p, y) == pytest.approx(float((p.argmax(1) == y).double().mean()))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=7))
def test_better_than_guessing_is_above_the_agreements_of_all_orders(pairs: list[tuple[int, int]]) -> None:
    predicted, labels = zip(*pairs, strict=True)
    agreements = [sum(p == y for p, y in zip(order, labels, strict=True)) for order in permutations(predicted)]
    chance = statistics.fmean(agreements) + 1.645 * statistics.pstdev(agreements)
    own = sum(p == y for p, y in pairs)
    expected = len({*labels}) == 1 or own > chance + 1e-9
    assert metrics.better_than_guessing(torch.tensor(predicted), torch.tensor(labels)) == expected


def test_another_order_of_classes_is_told_from_guessing() -> None:
    labels, noise = torch.arange(120) % 4, torch.randint(4, (120,), generator=torch.Generator().manual_seed(0))
    mostly = torch.where(torch.arange(120) % 7 == 0, noise, torch.tensor([1, 2, 0, 3])[labels])
    assert metrics.has_another_order(mostly, labels)
    for guesses in (noise, 0 * labels, 1 - labels.clamp(max=1)):
        assert not metrics.has_another_order(guesses, labels)
    for few in (1, 20):
        rare = (torch.arange(120) >= 120 - few).long()
        assert not metrics.has_another_order(0 * labels, rare) and not metrics.has_another_order(0 * labels + 1, rare)
        assert metrics.has_another_order(1 - rare, rare)


def test_certain_errors_have_a_finite_nll() -> None:
    p, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert metrics.nll(p, y) == pytest.approx(87.336, abs=1e-3)
    assert metrics.label_brier(p, y).tolist() == [2.0]
    assert metrics.nll(p, torch.tensor([0])) == 0.0


@given(PREDICTIONS, st.sampled_from([1, 2, 15]))
def test_calibration_errors_match_loops(predictions: list[tuple[float, bool]], bins: int) -> None:
    c, ok = unzip(predictions)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "ECE_BINS", bins)
        equal_width, equal_mass = metrics.ece(c, ok), metrics.adaptive_ece(c, ok)
    if not bool(((c[:, None] - edges).abs() < 1e-9).any()):  # edges round differently there
        assert equal_width == pytest.approx(naive.ece(c.tolist(), ok.tolist(), bins), abs=1e-12)
    assert equal_mass == pytest.approx(naive.adaptive_ece(c.tolist(), ok.tolist(), bins), abs=1e-12)


def test_ece_bins_are_open_below_and_closed_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ECE_BINS", 2)
    c, ok = tensor([0.0, 0.5, 0.5000001, 1.0]), torch.tensor([False, True, False, True])
    first, second = abs(0.0 + 0.5 - 1), abs(0.5000001 + 1 - 1)
    assert metrics.ece(c, ok) == pytest.approx((first + second) / 4)


PAIRS = st.lists(st.tuples(LEVELS, LEVELS), min_size=2, max_size=12)


@given(SCORES, SCORES)
def test_ranking_matches_loops_and_sklearn(inside: list[float], outside: list[float]) -> None:
    i, o, truth = tensor(inside), tensor(outside), np.repeat([0, 1], [len(inside), len(outside)])
    ranks = stats.rankdata(inside + outside)  # scikit-learn takes no infinite scores.
    assert metrics.auroc(i, o) == pytest.approx(naive.auroc(inside, outside))
    assert metrics.auroc(i, o) == pytest.approx(sklearn_metrics.roc_auc_score(truth, ranks))
    assert metrics.aupr(o, i) == pytest.approx(sklearn_metrics.average_precision_score(truth, ranks))
    assert metrics.aupr(-i, -o) == pytest.approx(sklearn_metrics.average_precision_score(1 - truth, -ranks))
    false, true, _ = sklearn_metrics.roc_curve(truth, ranks, drop_intermediate=False)
    assert metrics.fpr95(i, o) == pytest.approx(false[(true >= 0.95 - 1e-12).argmax()])


@given(PAIRS, PAIRS)
def test_difference_matches_loops(inside: list[tuple[float, float]], outside: list[tuple[float, float]]) -> None:
    (in_first, in_second), (out_first, out_second) = zip(*inside, strict=True), zip(*outside, strict=True)
    expected = naive.auroc_difference(in_first, out_first, in_second, out_second)
    samples = (tensor(list(part)) for part in (in_first, out_first, in_second, out_second))
    assert metrics.auroc_difference(*samples) == pytest.approx(expected, abs=1e-12)


@given(PREDICTIONS, st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_selective_metrics_match_loops(predictions: list[tuple[float, bool]], risk: float) -> None:
    c, ok = unzip(predictions)
    plain = c.tolist(), ok.tolist()
    assert metrics.aurc(c, ok) == pytest.approx(naive.aurc(*plain), abs=1e-12)
    assert metrics.augrc(c, ok) == pytest.approx(naive.augrc(*plain), abs=1e-12)
    assert metrics.coverage_at_risk(c, ok, risk) == pytest.approx(naive.coverage_at_risk(*plain, risk))


NUMBERS = st.lists(
    st.tuples(st.floats(-50, 50), st.floats(0.1, 20), st.floats(-50, 50)), min_size=2, max_size=20
).filter(lambda rows: len({y for _, _, y in rows}) > 1)


@given(NUMBERS)
def test_regression_metrics_equal_their_references(rows: list[tuple[float, float, float]]) -> None:
    mean, deviation, y = torch.tensor(rows, dtype=torch.float64).T
    assert rmse(mean, y) == pytest.approx(root_mean_squared_error(y, mean))
    assert r2(mean, y) == pytest.approx(r2_score(y, mean), rel=1e-9)
    assert gaussian_nll(mean, deviation, y) == pytest.approx(-stats.norm(mean, deviation).logpdf(y).mean())


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=7))
def test_better_than_guessing_is_above_the_correlations_of_all_orders(rows: list[tuple[int, int]]) -> None:
    mean, y = stats.rankdata(np.array(rows, float), axis=0).T
    products = [float(np.array(order) @ y) for order in permutations(mean)]
    chance = np.mean(products) + 1.645 * np.std(products)
    expected = bool((y == y[0]).all()) or (float(mean @ y) > chance + 1e-9 and np.ptp(mean) > 0)
    assert rises_with(torch.tensor(mean), torch.tensor(y)) == expected


def test_a_few_odd_numbers_do_not_make_a_network_guess() -> None:
    y = torch.linspace(0, 9, 200, dtype=torch.float64)
    mean = y + torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y[[3, 40, 77, 100, 150, 199]] = -999.0
    assert float(torch.corrcoef(torch.stack([mean, y]))[0, 1]) < 0.05
    assert rises_with(mean, y)


def test_crps_is_the_integral_of_its_definition() -> None:
    for mean, deviation, y in ((0.0, 1.0, 0.3), (2.0, 0.5, 5.0), (-1.0, 3.0, -1.0)):

        def gap(at: float, mean: float = mean, deviation: float = deviation, y: float = y) -> float:
            return float((stats.norm.cdf(at, mean, deviation) - (at >= y)) ** 2)

        ends = mean - 12 * deviation, mean + 12 * deviation
        expected = integrate.quad(gap, ends[0], y)[0] + integrate.quad(gap, y, ends[1])[0]
        got = crps(torch.tensor([mean]), torch.tensor([deviation]), torch.tensor([y]))
        assert got == pytest.approx(expected, rel=1e-5)


def test_numbers_that_do_not_vary() -> None:
    flat = torch.ones(3)
    assert (r2(flat, flat), r2(flat + 1, flat)) == (1.0, 0.0)
    assert np.isfinite(crps(flat, flat, flat))


CONFIDENCES = st.sampled_from([0.5, 0.9, 0.99])


def check_central(interval: CountInterval, mass: list[float], level: float) -> None:
    """Both tails are at most (1 − level) / 2, and neither end can move inwards."""
    low, high, tail = *interval, (1 - level) / 2
    assert math.fsum(mass[:low]) <= tail + 1e-9 and math.fsum(mass[high + 1 :]) <= tail + 1e-9
    assert math.fsum(mass[: low + 1]) > tail - 1e-9 and math.fsum(mass[high:]) > tail - 1e-9


@given(st.integers(1, 300), st.floats(0, 1), CONFIDENCES)
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


@given(st.integers(1, 2000), st.floats(1e-4, 1 - 1e-4), CONFIDENCES)
@example(10_000, 0.05, 0.99)
def test_binomial_acceptance_is_central(trials: int, alpha: float, level: float) -> None:
    check_central(binomial_acceptance(trials, alpha, level=level), naive.binomial_mass(trials, alpha), level)


@given(st.integers(1, 2000), st.integers(19, 5000), CONFIDENCES)
@example(10_000, 4000, 0.99)
def test_beta_binomial_acceptance_is_central(trials: int, calibration: int, level: float) -> None:
    rank = int(0.05 * (calibration + 1) + 1e-9)
    mass = stats.betabinom.pmf(range(trials + 1), trials, rank, calibration + 1 - rank).tolist()
    check_central(beta_binomial_acceptance(trials, 0.05, calibration, level=level), mass, level)


@given(st.integers(1, 2000), st.floats(0.001, 0.999), CONFIDENCES)
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


def test_calibrated_rates_by_hand() -> None:
    assert in_practice(0.05, 500).endswith("3.3 to 7.1")  # quantiles of Beta(25, 476)
    low, high = calibrated_rate(1 - 1e-12, 100)
    assert 0.9 < low < high <= 1 and beta_binomial_acceptance(50, 1 - 1e-12, 100).high == 50


def test_rejects_too_few_calibration_images() -> None:
    with pytest.raises(UsageError, match="alpha ≥ 1/20"):
        beta_binomial_acceptance(100, 0.01, 19)
    beta_binomial_acceptance(100, 0.05, 19)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([1.0, 7.0]), CONFIDENCES)
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
