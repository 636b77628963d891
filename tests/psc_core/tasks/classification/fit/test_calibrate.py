"""Fitting a calibration, and the ambiguity threshold against a search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import FitError
from psc_core.tasks.classification.answer import SCORES
from psc_core.tasks.classification.decide import ACCEPT, Thresholds
from psc_core.tasks.classification.fit.calibrate import (
    CONFIDENCE,
    ambiguity_threshold,
    fewest_to_show,
    first_test,
    fit_calibration,
    nearest_risk,
)
from psc_core.tasks.classification.heads.base import entropy as predictive_entropy
from psc_core.tasks.classification.policy import ClassificationPolicy, unreachable_entropy
from psc_core.tasks.outputs import Outputs, pack
from tests.reference import calibration as naive


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_fewest_images_that_show_a_threshold(risk: float) -> None:
    n = fewest_to_show(risk)
    shown = [
        ambiguity_threshold(torch.linspace(0, 1, count), torch.ones(count, dtype=torch.bool), risk=risk) is not None
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
        patch.setattr("psc_core.tasks.classification.fit.calibrate.LARGEST_QUANTILE", quantile)
        got = ambiguity_threshold(entropy, correct, risk=risk)
    assert got == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("hardness", [0.15, 0.6, 20.0])
def test_realised_risk_is_kept_in_the_stated_fraction_of_calibrations(hardness: float) -> None:
    """An image of entropy h is wrong with probability ``hardness`` h³, so the risk of a threshold t is t³ / 4 of it."""
    generator = torch.Generator().manual_seed(0)
    kept = found = 0
    for _ in range(200):
        entropy = torch.rand(1000, generator=generator)
        correct = torch.rand(1000, generator=generator) >= (hardness * entropy**3).clamp(max=1)
        threshold = ambiguity_threshold(entropy, correct, risk=0.05)
        kept += threshold is None or hardness * threshold**3 / 4 <= 0.05
        found += threshold is not None
    assert kept >= 0.95 * 200
    assert found >= 190 if hardness < 1 else found <= 10


def test_without_enough_images_there_is_no_threshold() -> None:
    entropy, right = torch.linspace(0, 1, 40), torch.ones(40, dtype=torch.bool)
    assert ambiguity_threshold(entropy, right, risk=0.05) is None
    assert ambiguity_threshold(entropy, right, risk=0.3) == pytest.approx(0.95, abs=0.03)
    assert ambiguity_threshold(entropy, ~right, risk=0.3) is None


def test_the_nearest_risk_is_the_first_hundredth_that_a_threshold_keeps() -> None:
    generator = torch.Generator().manual_seed(1)
    entropy = torch.rand(500, generator=generator)
    wrong = torch.rand(500, generator=generator) < 0.1
    nearest = nearest_risk(entropy, ~wrong, risk=0.005)
    kept = [step for step in range(1, 100) if ambiguity_threshold(entropy, ~wrong, risk=step / 100) is not None]
    assert nearest is not None and nearest.rate == kept[0] / 100
    assert nearest.threshold == ambiguity_threshold(entropy, ~wrong, risk=nearest.rate)
    following = nearest_risk(entropy, ~wrong, risk=nearest.rate)
    assert following is not None and following.rate == kept[1] / 100
    assert nearest_risk(entropy, torch.zeros(500, dtype=torch.bool), risk=0.05) is None


@pytest.mark.parametrize("classes", range(2, 200))
def test_equal_probabilities_do_not_reach_the_unreachable_entropy(classes: int) -> None:
    """Their entropy in float32 exceeds log K for a third of these K."""
    probabilities = torch.zeros(1, classes).softmax(1)
    scores = dict.fromkeys(SCORES, torch.ones(1)) | {"predictive_entropy": predictive_entropy(probabilities)}
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=unreachable_entropy(classes), coverage=0.9)
    outputs = Outputs(pack(SCORES, scores, probabilities).numpy(), SCORES, ())
    assert Thresholds(policy, 0.05, 1.0).decide(outputs).decision == [ACCEPT]
