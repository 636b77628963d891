"""AUROC, average precision and FPR95 against loops and scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from psc_core import metrics as ranking
from tests.psc_core.metrics.support import LEVELS, SCORES, tensor
from tests.reference import metrics as naive

PAIRS = st.lists(st.tuples(LEVELS, LEVELS), min_size=2, max_size=12)


@given(SCORES, SCORES)
def test_ranking_matches_loops_and_sklearn(inside: list[float], outside: list[float]) -> None:
    i, o = tensor(inside), tensor(outside)
    assert ranking.auroc(i, o) == pytest.approx(naive.auroc(inside, outside))
    assert ranking.aupr(o, i) == pytest.approx(naive.aupr(outside, inside))
    assert ranking.aupr(-i, -o) == pytest.approx(naive.aupr([-s for s in inside], [-s for s in outside]))
    assert ranking.fpr95(i, o) == pytest.approx(naive.fpr(inside, outside, 0.95))
    if not any(map(math.isinf, inside + outside)):
        truth, both = [0] * len(inside) + [1] * len(outside), inside + outside
        assert ranking.auroc(i, o) == pytest.approx(sklearn_metrics.roc_auc_score(truth, both))
        assert ranking.aupr(o, i) == pytest.approx(sklearn_metrics.average_precision_score(truth, both))
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
    assert ranking.aupr(o, i) == pytest.approx(5 / 8)
    assert ranking.aupr(-i, -o) == pytest.approx(3 / 8)


def test_difference_of_a_score_with_itself_is_zero() -> None:
    i, o = torch.randn(40), torch.randn(30) + 1
    assert ranking.auroc_difference(i, o, i, o) == (0.0, 0.0)
    assert ranking.auroc_difference(i[:1], o, i[:1], o).standard_error == math.inf


def test_standard_error_matches_resampling() -> None:
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


@given(PAIRS, PAIRS)
def test_difference_matches_loops(inside: list[tuple[float, float]], outside: list[tuple[float, float]]) -> None:
    (in_first, in_second), (out_first, out_second) = zip(*inside, strict=True), zip(*outside, strict=True)
    expected = naive.auroc_difference(in_first, out_first, in_second, out_second)
    samples = (tensor(list(part)) for part in (in_first, out_first, in_second, out_second))
    assert ranking.auroc_difference(*samples) == pytest.approx(expected, abs=1e-12)
