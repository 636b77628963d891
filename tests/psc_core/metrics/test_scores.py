"""Metrics against naive loops, scikit-learn and values known by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from psc_core.errors import UsageError
from psc_core.metrics import classification, inputs, ranking, selective
from tests.reference import metrics as naive

LEVELS = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 0.9, 1.0])
"""Few distinct values, so ties, all-equal inputs and the ends of [0, 1] are common."""

SCORES = st.one_of(
    st.lists(LEVELS, min_size=1, max_size=25),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=25),
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf]), min_size=1, max_size=8),
)
JUDGED = st.lists(st.tuples(st.one_of(LEVELS, st.floats(0, 1)), st.booleans()), min_size=1, max_size=40)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unzip(judged: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor([c for c, _ in judged]), torch.tensor([ok for _, ok in judged])


@st.composite
def classified(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (n, K), with zeros and ones, and labels."""
    classes = draw(st.integers(1, 5))
    weights = draw(st.lists(st.lists(LEVELS, min_size=classes, max_size=classes).filter(any), min_size=1, max_size=9))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=len(weights), max_size=len(weights)))
    raw = torch.tensor(weights, dtype=torch.float64)
    return raw / raw.sum(1, keepdim=True), torch.tensor(labels)


@given(classified())
def test_likelihood_scores_equal_loops(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, y = case
    assert classification.nll(p, y) == pytest.approx(naive.nll(p.tolist(), y.tolist(), classification.LOG_FLOOR))
    assert classification.brier(p, y) == pytest.approx(naive.brier(p.tolist(), y.tolist()), abs=1e-12)
    assert classification.accuracy(p, y) == pytest.approx(float((p.argmax(1) == y).double().mean()))


def test_certain_and_wrong_costs_a_bounded_price() -> None:
    p, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert classification.nll(p, y) == pytest.approx(87.336, abs=1e-3)
    assert classification.brier(p, y) == 2.0
    assert classification.nll(p, torch.tensor([0])) == 0.0


@given(JUDGED, st.sampled_from([1, 2, 15]))
def test_calibration_errors_equal_loops(judged: list[tuple[float, bool]], bins: int) -> None:
    c, ok = unzip(judged)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    if not bool(((c[:, None] - edges).abs() < 1e-9).any()):  # edges round differently there
        assert classification.ece(c, ok, bins=bins) == pytest.approx(
            naive.ece(c.tolist(), ok.tolist(), bins), abs=1e-12
        )
    assert classification.adaptive_ece(c, ok, bins=bins) == pytest.approx(
        naive.adaptive_ece(c.tolist(), ok.tolist(), bins), abs=1e-12
    )


def test_ece_bins_are_open_below_and_closed_above() -> None:
    c, ok = tensor([0.0, 0.5, 0.5000001, 1.0]), torch.tensor([False, True, False, True])
    first, second = abs(0.0 + 0.5 - 1), abs(0.5000001 + 1 - 1)
    assert classification.ece(c, ok, bins=2) == pytest.approx((first + second) / 4)


@given(SCORES, SCORES)
def test_detection_scores_equal_loops_and_sklearn(inside: list[float], outside: list[float]) -> None:
    i, o = tensor(inside), tensor(outside)
    assert ranking.auroc(i, o) == pytest.approx(naive.auroc(inside, outside))
    assert ranking.aupr_out(i, o) == pytest.approx(naive.aupr(outside, inside))
    assert ranking.aupr_in(i, o) == pytest.approx(naive.aupr([-s for s in inside], [-s for s in outside]))
    assert ranking.fpr95(i, o) == pytest.approx(naive.fpr(inside, outside, 0.95))
    if not any(map(math.isinf, inside + outside)):
        truth, both = [0] * len(inside) + [1] * len(outside), inside + outside
        assert ranking.auroc(i, o) == pytest.approx(sklearn_metrics.roc_auc_score(truth, both))
        assert ranking.aupr_out(i, o) == pytest.approx(sklearn_metrics.average_precision_score(truth, both))
        false, true, _ = sklearn_metrics.roc_curve(truth, both, drop_intermediate=False)
        assert ranking.fpr95(i, o) == pytest.approx(false[(true >= 0.95 - 1e-12).argmax()])


@given(SCORES, SCORES)
def test_auroc_is_antisymmetric(inside: list[float], outside: list[float]) -> None:
    i, o = tensor(inside), tensor(outside)
    assert ranking.auroc(i, o) + ranking.auroc(o, i) == pytest.approx(1.0)
    assert ranking.auroc(i, i) == pytest.approx(0.5)


def test_equal_scores_carry_no_information() -> None:
    i, o = torch.zeros(3), torch.zeros(5)
    assert ranking.auroc(i, o) == 0.5
    assert ranking.fpr95(i, o) == 1.0
    assert ranking.aupr_out(i, o) == pytest.approx(5 / 8)
    assert ranking.aupr_in(i, o) == pytest.approx(3 / 8)


def test_difference_of_a_score_with_itself_is_certainly_zero() -> None:
    i, o = torch.randn(40), torch.randn(30) + 1
    assert ranking.auroc_difference(i, o, i, o) == (0.0, 0.0)
    assert ranking.auroc_difference(i[:1], o, i[:1], o).standard_error == math.inf


def test_standard_error_of_a_difference_matches_resampling() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(400):
        i, o = torch.randn(60, generator=generator), torch.randn(50, generator=generator) + 1
        noisy_i = i + torch.randn(60, generator=generator)
        noisy_o = o + torch.randn(50, generator=generator)
        draws.append(ranking.auroc_difference(i, o, noisy_i, noisy_o))
    spread = torch.tensor([d.value for d in draws]).std().item()
    assert spread == pytest.approx(sum(d.standard_error for d in draws) / len(draws), rel=0.15)
    i, o = torch.randn(60, generator=generator), torch.randn(50, generator=generator)
    value = ranking.auroc_difference(i, o, -i, -o).value
    assert value == pytest.approx(ranking.auroc(i, o) - ranking.auroc(-i, -o))


@given(JUDGED, st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_selective_scores_equal_loops(judged: list[tuple[float, bool]], risk: float) -> None:
    c, ok = unzip(judged)
    plain = c.tolist(), ok.tolist()
    assert selective.aurc(c, ok) == pytest.approx(naive.aurc(*plain), abs=1e-12)
    assert selective.augrc(c, ok) == pytest.approx(naive.augrc(*plain), abs=1e-12)
    assert selective.coverage_at_risk(c, ok, risk) == pytest.approx(naive.coverage_at_risk(*plain, risk))


@given(JUDGED, st.randoms(use_true_random=False))
def test_order_of_input_does_not_matter(judged: list[tuple[float, bool]], random: object) -> None:
    c, ok = unzip(judged)
    order = torch.randperm(len(c), generator=torch.Generator().manual_seed(len(c)))
    for metric in (classification.ece, classification.adaptive_ece, selective.aurc, selective.augrc):
        assert metric(c, ok) == pytest.approx(metric(c[order], ok[order]), abs=1e-12)


def test_selective_scores_by_hand() -> None:
    c, ok = tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, True, False, True])
    assert selective.aurc(c, ok) == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert selective.augrc(c, ok) == pytest.approx((0 + 0 + 0.5 + 1) / 16)
    assert selective.coverage_at_risk(c, ok, 0.01) == 0.5
    assert selective.coverage_at_risk(c, ok, 0.25) == 1.0
    assert selective.coverage_at_risk(c, torch.tensor([False] * 4), 0.01) == 0.0
    assert selective.coverage_at_risk(c, torch.tensor([True] * 4), 0.0) == 1.0


def test_unusable_inputs_are_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="at least one value"):
        ranking.auroc(torch.zeros(0), torch.zeros(1))
    with pytest.raises(UsageError, match="NaN"):
        ranking.fpr95(torch.tensor([math.nan]), torch.zeros(1))
    with pytest.raises(UsageError, match="one length, got 2 and 1"):
        inputs.check_same_length("ece", torch.ones(2), torch.ones(1))  # callers' shapes are checked before, in tests
