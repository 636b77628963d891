"""Accuracy, likelihood and calibration errors against loops."""

from __future__ import annotations

import statistics
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import metrics as classification
from tests.psc_core.metrics.support import LEVELS, PREDICTIONS, tensor, unzip
from tests.reference import metrics as naive


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
    assert classification.nll(p, y) == pytest.approx(naive.nll(p.tolist(), y.tolist(), classification.LOG_FLOOR))
    assert float(classification.label_brier(p, y).mean()) == pytest.approx(
        naive.brier(p.tolist(), y.tolist()), abs=1e-12
    )
    assert classification.accuracy(p, y) == pytest.approx(float((p.argmax(1) == y).double().mean()))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=7))
def test_better_than_guessing_is_above_the_agreements_of_all_orders(pairs: list[tuple[int, int]]) -> None:
    predicted, labels = zip(*pairs, strict=True)
    agreements = [sum(p == y for p, y in zip(order, labels, strict=True)) for order in permutations(predicted)]
    chance = statistics.fmean(agreements) + 1.645 * statistics.pstdev(agreements)
    own = sum(p == y for p, y in pairs)
    expected = len({*labels}) == 1 or own > chance + 1e-9
    assert classification.better_than_guessing(torch.tensor(predicted), torch.tensor(labels)) == expected


def test_always_the_most_frequent_class_is_guessing() -> None:
    labels = torch.arange(100) // 95
    assert not classification.better_than_guessing(torch.zeros_like(labels), labels)
    assert classification.better_than_guessing(labels, labels)


def test_certain_errors_have_a_finite_nll() -> None:
    p, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert classification.nll(p, y) == pytest.approx(87.336, abs=1e-3)
    assert classification.label_brier(p, y).tolist() == [2.0]
    assert classification.nll(p, torch.tensor([0])) == 0.0


@given(PREDICTIONS, st.sampled_from([1, 2, 15]))
def test_calibration_errors_match_loops(predictions: list[tuple[float, bool]], bins: int) -> None:
    c, ok = unzip(predictions)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "ECE_BINS", bins)
        equal_width, equal_mass = classification.ece(c, ok), classification.adaptive_ece(c, ok)
    if not bool(((c[:, None] - edges).abs() < 1e-9).any()):  # edges round differently there
        assert equal_width == pytest.approx(naive.ece(c.tolist(), ok.tolist(), bins), abs=1e-12)
    assert equal_mass == pytest.approx(naive.adaptive_ece(c.tolist(), ok.tolist(), bins), abs=1e-12)


def test_ece_bins_are_open_below_and_closed_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "ECE_BINS", 2)
    c, ok = tensor([0.0, 0.5, 0.5000001, 1.0]), torch.tensor([False, True, False, True])
    first, second = abs(0.0 + 0.5 - 1), abs(0.5000001 + 1 - 1)
    assert classification.ece(c, ok) == pytest.approx((first + second) / 4)
