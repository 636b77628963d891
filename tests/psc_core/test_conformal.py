from __future__ import annotations

import math
from fractions import Fraction
from math import ceil, floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core.conformal import (
    check_fraction,
    check_rates,
    conformal_p_values,
    conformal_rank,
    decision_p_value,
    effective_count,
    equal_scores,
    ood_rank,
    ood_score_threshold,
    thin,
    tolerant_ceil,
)
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


@pytest.mark.parametrize("alpha", [0.008, 0.0, 1.0, -0.1, math.nan, 5e-324])
def test_rejects_unattainable_alpha(alpha: float) -> None:
    fitted = ascending([-float(score) for score in range(99)])
    assert math.isfinite(ood_score_threshold(fitted, 0.01))
    with pytest.raises(UsageError, match="alpha"):
        ood_score_threshold(fitted, alpha)


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


@pytest.mark.parametrize("coverage", [0.999, 1.5])
def test_rejects_unattainable_coverage(coverage: float) -> None:
    check_rates(200, coverage=200 / 201)
    with pytest.raises(UsageError, match="coverage"):
        check_rates(200, coverage=coverage)


WEIGHTED_FLOATS = st.one_of(st.sampled_from([-3.0, -1.5, 0.0, 0.125, 2.0]), st.floats(-1e6, 1e6, width=32))
WEIGHTED = st.lists(st.tuples(WEIGHTED_FLOATS, st.sampled_from([1, 2, 5, 20, 100])), min_size=1, max_size=60)


@given(WEIGHTED, st.lists(WEIGHTED_FLOATS, min_size=1, max_size=20))
def test_p_values_are_the_weighted_ones_rounded_up(images: list[tuple[float, int]], tested: list[float]) -> None:
    scores, weights = (list(part) for part in zip(*images, strict=True))
    given_weights = torch.tensor(weights, dtype=torch.float64)
    kept = torch.tensor(scores)[equal_scores(torch.tensor(scores), given_weights)]
    assert len(kept) == effective_count(given_weights) == math.floor(Fraction(sum(weights), max(weights)))
    assert (kept.diff() >= 0).all()
    tested += scores
    steps = (conformal_p_values(kept, torch.tensor(tested)) * (len(kept) + 1)).round().int().tolist()
    for score, step in zip(tested, steps, strict=True):
        exact = naive.weighted_p_value(scores, [Fraction(w) for w in weights], score)
        assert step == math.ceil(exact * (len(kept) + 1))


@given(st.lists(WEIGHTED_FLOATS, min_size=1, max_size=60), st.sampled_from([1.0, 3.0, 1 / 0.02]))
def test_equal_weights_change_nothing(scores: list[float], weight: float) -> None:
    all_of_them, weights = torch.tensor(scores), torch.full((len(scores),), weight)
    assert torch.equal(all_of_them[equal_scores(all_of_them, weights)], all_of_them.sort().values)
    assert torch.equal(all_of_them[equal_scores(all_of_them, None)], all_of_them.sort().values)
    assert thin(weights).all()


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [math.inf]])
def test_rejects_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="a positive finite weight"):
        effective_count(torch.tensor(weights))


def test_thinned_images_count_equally() -> None:
    assert thin(torch.empty(0)).shape == (0,)
    weights = torch.cat([torch.ones(5000), torch.full((500,), 10.0)])
    kept = thin(weights)
    assert kept[5000:].all()
    assert int(kept[:5000].sum()) == pytest.approx(500, abs=80)


@given(hundredths=st.integers(1, 99), n=st.integers(1, 10_000))
def test_ranks_are_those_of_the_decimal_number(hundredths: int, n: int) -> None:
    exact = Fraction(hundredths, 100) * (n + 1)
    assert ood_rank(hundredths / 100, n) == floor(exact)
    assert tolerant_ceil(hundredths / 100 * (n + 1)) == ceil(exact)
    assert conformal_rank(hundredths / 100, n) == ceil(exact)


@pytest.mark.parametrize("coverage", [5e-324, 1e-14, 1e-9])
def test_a_tiny_coverage_has_the_first_rank(coverage: float) -> None:
    assert [conformal_rank(coverage, n) for n in (1, 1000)] == [1, 1]


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_rejects_what_is_no_fraction(value: float) -> None:
    with pytest.raises(UsageError, match="risk"):
        check_fraction(value, "risk")
