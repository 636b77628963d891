"""p-values, thresholds and prediction sets: definitions, guarantees, storage."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.calibration.conformal import Calibration, conformal_p_values
from psc_core.calibration.fit import fit_calibration
from psc_core.errors import BundleError, UsageError
from psc_core.policy import Policy
from psc_core.rates import ood_rank
from tests.psc_core.calibration.support import SCORES, calibrate, from_scores, prediction_sets
from tests.reference import calibration as naive


@given(SCORES, SCORES)
def test_p_values_match_counts(calibration: list[float], scores: list[float]) -> None:
    got = conformal_p_values(from_scores(calibration).ood_scores, -torch.tensor(scores))
    for p, score in zip(got.tolist(), scores, strict=True):
        assert p == pytest.approx(float(naive.p_value(calibration, score)), rel=1e-6)


@given(SCORES, SCORES, st.integers(1, 99))
def test_threshold_matches_the_p_values(calibration: list[float], scores: list[float], hundredths: int) -> None:
    alpha, fitted = Fraction(hundredths, 100), from_scores(calibration)
    if alpha * (len(calibration) + 1) < 1:
        with pytest.raises(UsageError, match="no p-value is smaller"):
            fitted.ood_score_threshold(float(alpha))
        return
    threshold = -fitted.ood_score_threshold(float(alpha))
    for score in scores + calibration:
        assert (score < threshold) == (naive.p_value(calibration, score) <= alpha)


@given(SCORES, st.floats(1e-6, 1 - 1e-6))
def test_thresholds_on_scores_and_on_p_values_agree(calibration: list[float], alpha: float) -> None:
    fitted = from_scores(calibration)
    if ood_rank(alpha, len(fitted)) < 1:
        return
    thresholds = fitted.thresholds(
        Policy(alpha=alpha, ambiguity_threshold=1.0, coverage=0.5 * len(fitted) / (len(fitted) + 1))
    )
    p_values = conformal_p_values(fitted.ood_scores, fitted.ood_scores)
    assert torch.equal(p_values <= thresholds.ood_p_value, fitted.ood_scores > fitted.ood_score_threshold(alpha))


def test_an_alpha_that_misses_a_p_value_by_rounding_counts_as_that_p_value() -> None:
    fitted = from_scores([-float(score) for score in range(99)])
    policy = Policy(alpha=0.05 - 1e-12, ambiguity_threshold=1.0, coverage=0.9)
    assert fitted.thresholds(policy).ood_p_value == pytest.approx(0.055)
    assert fitted.thresholds(policy.model_copy(update={"alpha": 0.0499})).ood_p_value == pytest.approx(0.045)


def test_alpha_tolerates_rounding() -> None:
    fitted = from_scores([-float(score) for score in range(99)])
    threshold = fitted.ood_score_threshold(0.29)  # 0.29 × 100 < 29 in float64
    assert threshold == 70.0
    assert conformal_p_values(fitted.ood_scores, torch.tensor([70.0, 71.0])).tolist() == pytest.approx([0.30, 0.29])


def test_p_values_at_the_ends() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    tested = torch.tensor([math.inf, 3.5, 3.0, 1.0, -math.inf, math.nan])
    assert conformal_p_values(scores, tested).tolist() == [0.25, 0.25, 0.5, 1.0, 1.0, 0.25]


def test_rejects_unattainable_alpha() -> None:
    fitted = calibrate(99)
    assert math.isfinite(fitted.ood_score_threshold(0.01))
    with pytest.raises(UsageError, match=r"alpha ≥ 1/\(n \+ 1\) = 0.01 with n = 99 .* at least 124 images"):
        fitted.ood_score_threshold(0.008)
    for alpha in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(UsageError, match="between 0 and 1"):
            fitted.ood_score_threshold(alpha)


def test_mean_false_alarm_rate_is_alpha() -> None:
    rates = []
    for seed in range(300):
        random = torch.Generator().manual_seed(seed)
        scores = torch.randn(59, generator=random).tolist()
        threshold = -from_scores(scores).ood_score_threshold(0.05)
        rates.append((torch.randn(200, generator=random) < threshold).float().mean().item())
    assert sum(rates) / len(rates) == pytest.approx(0.05, abs=0.006)


@given(st.integers(0, 2**16), st.integers(5, 40), st.integers(50, 83))
def test_prediction_sets_match_the_definition(seed: int, n: int, percent: int) -> None:
    random = torch.Generator().manual_seed(seed)
    probabilities = (torch.randint(0, 4, (n, 3), generator=random) + 0.5).float()
    probabilities /= probabilities.sum(1, keepdim=True)
    labels = torch.randint(0, 3, (n,), generator=random)
    fitted = fit_calibration(torch.zeros(n), torch.zeros(n), probabilities, labels)
    true = probabilities.gather(1, labels[:, None])[:, 0].tolist()
    got = prediction_sets(fitted.set_threshold(percent / 100), probabilities)
    for row, members in zip(probabilities.tolist(), got, strict=True):
        assert set(members.nonzero()[:, 0].tolist()) == naive.prediction_set(true, row, Fraction(percent, 100))


def test_prediction_sets_cover() -> None:
    covered = []
    for seed in range(100):
        random = torch.Generator().manual_seed(seed)
        probabilities = torch.randn(600, 4, generator=random).mul(0.8).softmax(1)
        # the model is overconfident in class 0 and blind to class 3: coverage must hold all the same
        skewed = probabilities * torch.tensor([1.0, 2.0, 1.0, 4.0])
        labels = torch.multinomial(skewed, 1, generator=random)[:, 0]
        part = slice(0, 300)
        fitted = fit_calibration(torch.zeros(300), torch.zeros(300), probabilities[part], labels[part])
        sets = prediction_sets(fitted.set_threshold(0.9), probabilities[300:])
        hit = sets.gather(1, labels[300:, None])[:, 0]
        covered.append(float(hit.float().mean()))
        assert sets.any(1).all()
    assert sum(covered) / len(covered) == pytest.approx(0.9, abs=0.008)


def test_rejects_unattainable_coverage() -> None:
    with pytest.raises(UsageError, match=r"coverage ≤ n/\(n \+ 1\)"):
        calibrate(200).set_threshold(0.999)
    with pytest.raises(UsageError, match="between 0 and 1"):
        calibrate(200).set_threshold(1.5)


def test_tensors_round_trip() -> None:
    fitted = calibrate()
    again = Calibration.from_tensors(fitted.tensors())
    assert len(again) == 200
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in fitted.tensors().items())
    assert all(fitted.tensors()[name].dtype == torch.float32 for name in ("scores", "entropies"))


def test_rejects_unusable_tensors() -> None:
    tensors = calibrate().tensors()
    bad = {
        "missing": {name: tensor for name, tensor in tensors.items() if name != "scores"},
        "float64": {**tensors, "scores": tensors["scores"].double()},
        "descending": {**tensors, "scores": tensors["scores"].flip(0)},
        "short": {**tensors, "entropies": tensors["entropies"][:-1]},
        "NaN": {**tensors, "entropies": tensors["entropies"] * math.nan},
        "labels": {**tensors, "labels": tensors["labels"] + 3},
        "entropies below 0": {**tensors, "entropies": tensors["entropies"] - 1},
        "probabilities above 1": {**tensors, "label_probabilities": tensors["label_probabilities"] + 1},
        "scores of no density": {**tensors, "scores": tensors["scores"] * 1e30},
        "label type": {**tensors, "labels": tensors["labels"].float()},
    }
    for tensors in bad.values():
        with pytest.raises(BundleError, match="expected"):
            Calibration.from_tensors(tensors)


def test_rejects_another_type_of_num_classes() -> None:
    tensors = calibrate().tensors()
    with pytest.raises(BundleError, match=r"int64 num_classes .* got torch\.int32"):
        Calibration.from_tensors({**tensors, "num_classes": tensors["num_classes"].int()})


@pytest.mark.parametrize("alpha", [1 - 1e-16, 1 - 1e-12, 0.999999])
def test_alpha_near_one(alpha: float) -> None:
    calibration = fit_calibration(-torch.arange(5.0), torch.rand(5), torch.full((5, 2), 0.5), torch.zeros(5).long())
    if alpha < 1:
        threshold = calibration.ood_score_threshold(alpha)
        for score in (1.0, -3.5, -4.0, -5.0):
            p = float(conformal_p_values(calibration.ood_scores, torch.tensor([score]))[0])
            assert (p <= alpha) == (score > threshold)


def test_rejects_denormal_alpha() -> None:
    calibration = fit_calibration(-torch.arange(5.0), torch.rand(5), torch.full((5, 2), 0.5), torch.zeros(5).long())
    with pytest.raises(UsageError, match="expected alpha"):
        calibration.ood_score_threshold(5e-324)
