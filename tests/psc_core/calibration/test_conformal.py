"""p-values and the thresholds that they give, beside counting."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core.conformal import check_rates, conformal_p_values, decision_p_value, ood_rank, ood_score_threshold
from psc_core.errors import UsageError
from tests.reference import calibration as naive

FLOATS = st.one_of(st.sampled_from([-3.0, -1.5, 0.0, 0.125, 2.0]), st.floats(-1e6, 1e6, width=32))
SCORES = st.lists(FLOATS, min_size=1, max_size=60)


def ascending(scores: list[float]) -> Tensor:
    """OOD scores of calibration images from their negatives, such as log densities."""
    return (-torch.tensor(scores)).sort().values


@given(SCORES, SCORES)
def test_p_values_match_counts(calibration: list[float], scores: list[float]) -> None:
    got = conformal_p_values(ascending(calibration), -torch.tensor(scores))
    for p, score in zip(got.tolist(), scores, strict=True):
        assert p == pytest.approx(float(naive.p_value(calibration, score)), rel=1e-6)


@given(SCORES, SCORES, st.integers(1, 99))
def test_threshold_matches_the_p_values(calibration: list[float], scores: list[float], hundredths: int) -> None:
    alpha, fitted = Fraction(hundredths, 100), ascending(calibration)
    if alpha * (len(calibration) + 1) < 1:
        with pytest.raises(UsageError, match="no p-value is smaller"):
            ood_score_threshold(fitted, float(alpha))
        return
    threshold = -ood_score_threshold(fitted, float(alpha))
    for score in scores + calibration:
        assert (score < threshold) == (naive.p_value(calibration, score) <= alpha)


def test_alpha_tolerates_rounding() -> None:
    fitted = ascending([-float(score) for score in range(99)])
    threshold = ood_score_threshold(fitted, 0.29)  # 0.29 × 100 < 29 in float64
    assert threshold == 70.0
    assert conformal_p_values(fitted, torch.tensor([70.0, 71.0])).tolist() == pytest.approx([0.30, 0.29])


def test_p_values_at_the_ends() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    tested = torch.tensor([math.inf, 3.5, 3.0, 1.0, -math.inf, math.nan])
    assert conformal_p_values(scores, tested).tolist() == [0.25, 0.25, 0.5, 1.0, 1.0, 0.25]


def test_rejects_unattainable_alpha() -> None:
    fitted = ascending([-float(score) for score in range(99)])
    assert math.isfinite(ood_score_threshold(fitted, 0.01))
    with pytest.raises(UsageError, match=r"alpha ≥ 1/\(n \+ 1\) = 0.01 with n = 99 .* at least 124 images"):
        ood_score_threshold(fitted, 0.008)
    for alpha in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(UsageError, match="between 0 and 1"):
            ood_score_threshold(fitted, alpha)


def test_mean_false_alarm_rate_is_alpha() -> None:
    rates = []
    for seed in range(300):
        random = torch.Generator().manual_seed(seed)
        scores = torch.randn(59, generator=random).tolist()
        threshold = -ood_score_threshold(ascending(scores), 0.05)
        rates.append((torch.randn(200, generator=random) < threshold).float().mean().item())
    assert sum(rates) / len(rates) == pytest.approx(0.05, abs=0.006)


@given(SCORES, st.floats(1e-6, 1 - 1e-6))
def test_thresholds_on_scores_and_on_p_values_agree(calibration: list[float], alpha: float) -> None:
    scores = ascending(calibration)
    if ood_rank(alpha, len(scores)) < 1:
        return
    p_values = conformal_p_values(scores, scores)
    assert torch.equal(p_values <= decision_p_value(alpha, len(scores)), scores > ood_score_threshold(scores, alpha))


def test_an_alpha_that_misses_a_p_value_by_rounding_counts_as_that_p_value() -> None:
    assert decision_p_value(0.05 - 1e-12, 99) == pytest.approx(0.055)
    assert decision_p_value(0.0499, 99) == pytest.approx(0.045)


@pytest.mark.parametrize("alpha", [1 - 1e-12, 0.999999])
def test_alpha_near_one(alpha: float) -> None:
    scores = ascending([0.0, 1.0, 2.0, 3.0, 4.0])
    threshold = ood_score_threshold(scores, alpha)
    for score in (1.0, -3.5, -4.0, -5.0):
        p = float(conformal_p_values(scores, torch.tensor([score]))[0])
        assert (p <= alpha) == (score > threshold)


def test_rejects_denormal_alpha() -> None:
    with pytest.raises(UsageError, match="expected alpha"):
        ood_score_threshold(torch.arange(5.0), 5e-324)


@pytest.mark.parametrize("coverage", [0.999, 1.5])
def test_rejects_unattainable_coverage(coverage: float) -> None:
    check_rates(200, coverage=200 / 201)
    with pytest.raises(UsageError, match=r"coverage ≤ n/\(n \+ 1\)|between 0 and 1"):
        check_rates(200, coverage=coverage)
