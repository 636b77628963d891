"""Fitting a calibration, and the ambiguity threshold against a search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.answers import ACCEPTS_NOTHING, CLASSIFICATION_SCORES, RISKS, ClassificationPolicy
from psc_core.errors import FitError
from psc_core.tasks.base import Outputs, pack
from psc_core.tasks.classification import (
    ABSTAIN_AMBIGUOUS,
    CONFIDENCE,
    Errors,
    Thresholds,
    fewest_to_show,
    first_test,
    fit_calibration,
)
from tests.reference import calibration as naive


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_fewest_images_that_show_a_threshold(risk: float) -> None:
    n = fewest_to_show(risk)
    shown = [
        Errors.of(torch.linspace(0, 1, count), torch.ones(count, dtype=torch.bool)).threshold(risk) is not None
        for count in (n - 1, n)
    ]
    assert shown == [False, True]


def test_rejects_scores_that_are_not_finite() -> None:
    n, zeros = 5, torch.zeros(5)
    with pytest.raises(FitError, match="finite OOD scores"):
        fit_calibration(zeros - math.inf, zeros, torch.full((n, 2), 0.5), torch.zeros(n, dtype=torch.int64))


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 2.0]), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.05, 0.3, 0.9]),
    st.sampled_from([0.5, 0.95]),
)
def test_ambiguity_threshold_matches_counting(images: list[tuple[float, bool]], risk: float, quantile: float) -> None:
    entropy = torch.tensor([value for value, _ in images])
    correct = torch.tensor([right for _, right in images])
    first = first_test(len(images), risk)
    expected = naive.ambiguity_threshold(entropy, correct, risk, quantile, confidence=CONFIDENCE, first=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psc_core.tasks.classification.LARGEST_QUANTILE", quantile)
        got = Errors.of(entropy, correct).threshold(risk)
    assert got == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("hardness", [0.15, 0.6, 20.0])
def test_realised_risk_is_kept_in_the_stated_fraction_of_calibrations(hardness: float) -> None:
    """An image of entropy h is wrong with probability ``hardness`` h³, so the risk of a threshold t is t³ / 4 of it."""
    generator = torch.Generator().manual_seed(0)
    kept = found = 0
    for _ in range(200):
        entropy = torch.rand(1000, generator=generator)
        correct = torch.rand(1000, generator=generator) >= (hardness * entropy**3).clamp(max=1)
        threshold = Errors.of(entropy, correct).threshold(0.05)
        kept += threshold is None or hardness * threshold**3 / 4 <= 0.05
        found += threshold is not None
    assert kept >= 0.95 * 200
    assert found >= 190 if hardness < 1 else found <= 10


def test_the_lowest_risk_is_kept_in_the_stated_fraction_of_calibrations() -> None:
    """Of images of entropy h a fraction (c h)³ is wrong, so where all below t are accepted (c t)³ / 4 are.

    For each c another of the risks is close to what the smallest threshold that is tested keeps.
    """
    generator = torch.Generator().manual_seed(0)
    for hardness in (0.7, 1.0, 1.3, 1.6):
        kept = 0
        for _ in range(200):
            entropy = torch.rand(500, generator=generator)
            correct = torch.rand(500, generator=generator) >= (hardness * entropy).clamp(max=1) ** 3
            found = Errors.of(entropy, correct).lowest(RISKS)
            kept += found is None or (hardness * found[1]) ** 3 / 4 <= found[0]
        assert kept >= 0.95 * 200


@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0, 1))
def test_the_lowest_risk_is_the_first_that_a_threshold_keeps(seed: int, n: int, errors: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    entropy, wrong = torch.rand(n, generator=generator), torch.rand(n, generator=generator) < errors
    counted = Errors.of(entropy, ~wrong)
    thresholds = [counted.threshold(risk, confidence=1 - 0.05 / len(RISKS)) for risk in RISKS]
    shown = [(risk, threshold) for risk, threshold in zip(RISKS, thresholds, strict=True) if threshold is not None]
    assert counted.lowest(RISKS) == (shown[0] if shown else None)
    asked = counted.threshold(0.07)
    assert counted.lowest([0.07]) == (None if asked is None else (0.07, asked))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7]), st.booleans()), max_size=40))
def test_bounds_are_those_of_clopper_and_pearson(images: list[tuple[float, bool]]) -> None:
    """So many errors have at the bound exactly the probability 1 − confidence, one image being left out."""
    entropy, correct = (torch.tensor([row[i] for row in images]) for i in range(2))
    at = torch.tensor([-1.0, 0.0, 0.3, 0.7, 2.0])
    for threshold, bound in zip(at.tolist(), Errors.of(entropy, correct.bool()).bounds_at(at).tolist(), strict=True):
        accepted = [right for value, right in images if value <= threshold + 1e-6]
        n, errors = len(accepted) - 1, accepted.count(False)
        if errors >= n:
            assert bound == 1
        else:
            tail = math.fsum(math.comb(n, k) * bound**k * (1 - bound) ** (n - k) for k in range(errors + 1))
            assert tail == pytest.approx(1 - CONFIDENCE, rel=1e-4)


def test_without_enough_images_there_is_no_threshold() -> None:
    entropy, right = torch.linspace(0, 1, 40), torch.ones(40, dtype=torch.bool)
    assert Errors.of(entropy, right).threshold(0.05) is None
    assert Errors.of(entropy, right).threshold(0.3) == pytest.approx(0.95, abs=0.03)
    assert Errors.of(entropy, ~right).threshold(0.3) is None


@pytest.mark.parametrize("accuracy", [0.5, 0.7])
@pytest.mark.parametrize("n", [8, 100, 1000])
def test_of_guesses_no_risk_is_shown(n: int, accuracy: float) -> None:
    generator = torch.Generator().manual_seed(n)
    entropy = torch.rand(n, generator=generator)
    found = [Errors.of(entropy, torch.rand(n, generator=generator) < accuracy).lowest(RISKS) for _ in range(200)]
    assert found.count(None) >= 0.95 * 200


@given(st.floats(0, 88), st.integers(2, 50))
def test_where_nothing_is_accepted_no_entropy_is_low_enough(sharpness: float, classes: int) -> None:
    """Not even that of a probability of 1."""
    probabilities = torch.zeros(1, classes)
    probabilities[0, 0] = sharpness
    scores = dict.fromkeys(CLASSIFICATION_SCORES, torch.ones(1)) | {"predictive_entropy": torch.zeros(1)}
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=ACCEPTS_NOTHING, coverage=0.9)
    outputs = Outputs(pack(CLASSIFICATION_SCORES, scores, probabilities.softmax(1)).numpy(), CLASSIFICATION_SCORES, ())
    assert Thresholds(policy, 0.05, 1.0).decide(outputs).decision == [ABSTAIN_AMBIGUOUS]
