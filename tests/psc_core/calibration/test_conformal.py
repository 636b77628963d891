from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core.calibration.conformal import Calibration, conformal_p_values
from psc_core.calibration.fit import ambiguity_threshold, fit_calibration
from psc_core.errors import BundleError, FitError, UsageError
from psc_core.model.decision import decide
from psc_core.model.outputs import Outputs
from psc_core.policy import Policy
from psc_core.prediction import SCORES as COLUMNS
from tests.reference import calibration as naive

FEW_VALUES = st.sampled_from([-3.0, -1.5, 0.0, 0.125, 2.0])
FLOATS = st.one_of(FEW_VALUES, st.floats(-1e6, 1e6, width=32))
SCORES = st.lists(FLOATS, min_size=1, max_size=60)


def calibrate(n: int = 200, classes: int = 4, *, seed: int = 0, labels: Tensor | None = None) -> Calibration:
    random = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(n, classes, generator=random).mul(2).softmax(1)
    drawn = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    entropy = torch.special.entr(probabilities).sum(1)
    return fit_calibration(
        torch.randn(n, generator=random), entropy, probabilities, drawn if labels is None else labels
    )


def prediction_sets(thresholds: Tensor, probabilities: Tensor) -> Tensor:
    packed = torch.cat([torch.zeros(len(probabilities), len(COLUMNS)), probabilities], 1)
    policy = Policy(alpha=0.5, ambiguity_threshold=1.0, coverage=0.9)
    return torch.from_numpy(decide(Outputs(packed.numpy()), thresholds.numpy(), policy).prediction_set)


def from_scores(scores: list[float]) -> Calibration:
    """From negated OOD scores, such as log densities."""
    n = len(scores)
    return fit_calibration(
        -torch.tensor(scores), torch.rand(n), torch.full((n, 2), 0.5), torch.zeros(n, dtype=torch.int64)
    )


@given(SCORES, SCORES)
def test_p_values_are_counts(calibration: list[float], scores: list[float]) -> None:
    got = from_scores(calibration).p_values(-torch.tensor(scores))
    for p, score in zip(got.tolist(), scores, strict=True):
        assert p == pytest.approx(float(naive.p_value(calibration, score)), rel=1e-6)


@given(SCORES, SCORES, st.integers(1, 99))
def test_threshold_is_the_exact_form_of_the_p_value_rule(
    calibration: list[float], scores: list[float], hundredths: int
) -> None:
    alpha, fitted = Fraction(hundredths, 100), from_scores(calibration)
    if alpha * (len(calibration) + 1) < 1:
        with pytest.raises(UsageError, match="no p-value is smaller"):
            fitted.ood_score_threshold(float(alpha))
        return
    threshold = -fitted.ood_score_threshold(float(alpha))
    for score in scores + calibration:
        assert (score < threshold) == (naive.p_value(calibration, score) <= alpha)


def test_an_alpha_that_rounding_puts_below_a_share_of_the_images_is_that_share() -> None:
    fitted = from_scores([-float(score) for score in range(99)])
    threshold = fitted.ood_score_threshold(0.29)  # 0.29 × 100 < 29 in float64
    assert threshold == 70.0
    assert fitted.p_values(torch.tensor([70.0, 71.0])).tolist() == pytest.approx([0.30, 0.29])


def test_p_values_at_the_ends() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    asked = torch.tensor([math.inf, 3.5, 3.0, 1.0, -math.inf, math.nan])
    assert conformal_p_values(scores, asked).tolist() == [0.25, 0.25, 0.5, 1.0, 1.0, 0.25]


def test_an_alpha_that_can_never_alarm_is_refused() -> None:
    fitted = calibrate(99)
    assert math.isfinite(fitted.ood_score_threshold(0.01))
    with pytest.raises(UsageError, match=r"alpha ≥ 1/\(n \+ 1\) = 0.01 with n = 99 .* at least 124 images"):
        fitted.ood_score_threshold(0.008)
    for alpha in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(UsageError, match="between 0 and 1"):
            fitted.ood_score_threshold(alpha)


def test_false_alarms_stay_under_alpha_on_average() -> None:
    rates = []
    for seed in range(300):
        random = torch.Generator().manual_seed(seed)
        scores = torch.randn(59, generator=random).tolist()
        threshold = -from_scores(scores).ood_score_threshold(0.05)
        rates.append((torch.randn(200, generator=random) < threshold).float().mean().item())
    assert sum(rates) / len(rates) == pytest.approx(0.05, abs=0.006)


@given(st.integers(0, 2**16), st.integers(5, 40), st.integers(50, 83))
def test_prediction_sets_are_the_definition(seed: int, n: int, percent: int) -> None:
    random = torch.Generator().manual_seed(seed)
    probabilities = (torch.randint(0, 4, (n, 3), generator=random) + 0.5).float()
    probabilities /= probabilities.sum(1, keepdim=True)
    labels = torch.randint(0, 3, (n,), generator=random)
    fitted = fit_calibration(torch.zeros(n), torch.zeros(n), probabilities, labels)
    true = probabilities.gather(1, labels[:, None])[:, 0].tolist()
    got = prediction_sets(fitted.set_thresholds(percent / 100), probabilities)
    for row, members in zip(probabilities.tolist(), got, strict=True):
        assert set(members.nonzero()[:, 0].tolist()) == naive.prediction_set(true, row, Fraction(percent, 100))


@pytest.mark.parametrize("per_class", [False, True])
def test_prediction_sets_cover(per_class: bool) -> None:
    covered = []
    for seed in range(100):
        random = torch.Generator().manual_seed(seed)
        probabilities = torch.randn(600, 4, generator=random).mul(0.8).softmax(1)
        # the model is overconfident in class 0 and blind to class 3: coverage must hold all the same
        skewed = probabilities * torch.tensor([1.0, 2.0, 1.0, 4.0])
        labels = torch.multinomial(skewed, 1, generator=random)[:, 0]
        part = slice(0, 300)
        fitted = fit_calibration(torch.zeros(300), torch.zeros(300), probabilities[part], labels[part])
        sets = prediction_sets(fitted.set_thresholds(0.9, per_class=per_class), probabilities[300:])
        hit = sets.gather(1, labels[300:, None])[:, 0]
        covered.append([hit.float().mean(), *(hit[labels[300:] == k].float().mean() for k in range(4))])
        assert sets.any(1).all()
    means = torch.tensor(covered).mean(0)
    assert means[0] >= 0.892
    if per_class:
        assert (means[1:] >= 0.89).all()
    else:
        assert means[0] == pytest.approx(0.9, abs=0.01)


def test_a_class_without_enough_images_is_in_every_set() -> None:
    labels = torch.tensor([0] * 50 + [1] * 50 + [2] * 18 + [3] * 82)
    fitted = calibrate(200, labels=labels)
    thresholds = fitted.set_thresholds(0.95, per_class=True)
    assert thresholds[2] == 0  # 18 < 0.95 / 0.05
    assert (thresholds[[0, 1, 3]] > 0).all()
    assert prediction_sets(thresholds, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))[0, 2]
    with pytest.raises(UsageError, match=r"coverage ≤ n/\(n \+ 1\)"):
        fitted.set_thresholds(0.999)
    with pytest.raises(UsageError, match="between 0 and 1"):
        fitted.set_thresholds(1.5, per_class=True)


def test_tensors_round_trip() -> None:
    fitted = calibrate()
    again = Calibration.from_tensors(fitted.tensors())
    assert len(again) == 200
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in fitted.tensors().items())
    assert all(fitted.tensors()[name].dtype == torch.float32 for name in ("scores", "entropies"))


def test_bad_tensors_are_refused() -> None:
    tensors = calibrate().tensors()
    bad = {
        "missing": {name: tensor for name, tensor in tensors.items() if name != "scores"},
        "float64": {**tensors, "scores": tensors["scores"].double()},
        "descending": {**tensors, "scores": tensors["scores"].flip(0)},
        "short": {**tensors, "entropies": tensors["entropies"][:-1]},
        "NaN": {**tensors, "entropies": tensors["entropies"] * math.nan},
        "labels": {**tensors, "labels": tensors["labels"] + 3},
        "label type": {**tensors, "labels": tensors["labels"].float()},
    }
    for tensors in bad.values():
        with pytest.raises(BundleError, match="expected"):
            Calibration.from_tensors(tensors)


def test_the_number_of_classes_has_the_type_of_the_format() -> None:
    tensors = calibrate().tensors()
    with pytest.raises(BundleError, match=r"int64 num_classes .* got torch\.int32"):
        Calibration.from_tensors({**tensors, "num_classes": tensors["num_classes"].int()})


def test_scores_that_cannot_calibrate_are_refused() -> None:
    n, zeros = 5, torch.zeros(5)
    probabilities, labels = torch.full((n, 2), 0.5), torch.zeros(n, dtype=torch.int64)
    with pytest.raises(FitError, match="finite OOD scores"):
        fit_calibration(zeros - math.inf, zeros, probabilities, labels)
    with pytest.raises(FitError, match="labels 0 … 1"):
        fit_calibration(zeros, zeros, probabilities, labels + 2)
    with pytest.raises(FitError, match="at least one"):
        fit_calibration(zeros[:0], zeros[:0], probabilities[:0], labels[:0])


@pytest.mark.parametrize("alpha", [1 - 1e-16, 1 - 1e-12, 0.999999])
def test_an_alpha_within_rounding_of_one_keeps_the_rule(alpha: float) -> None:
    calibration = fit_calibration(-torch.arange(5.0), torch.rand(5), torch.full((5, 2), 0.5), torch.zeros(5).long())
    if alpha < 1:
        threshold = calibration.ood_score_threshold(alpha)
        for score in (1.0, -3.5, -4.0, -5.0):
            p = float(calibration.p_values(torch.tensor([score]))[0])
            assert (p <= alpha) == (score > threshold)


def test_a_denormal_alpha_is_refused() -> None:
    calibration = fit_calibration(-torch.arange(5.0), torch.rand(5), torch.full((5, 2), 0.5), torch.zeros(5).long())
    with pytest.raises(UsageError, match="expected alpha"):
        calibration.ood_score_threshold(5e-324)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 2.0]), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.05, 0.3, 0.9]),
    st.sampled_from([0.5, 0.95]),
)
def test_ambiguity_threshold_is_the_naive_search(
    images: list[tuple[float, bool]], risk: float, quantile: float
) -> None:
    entropy = torch.tensor([value for value, _ in images])
    correct = torch.tensor([right for _, right in images])
    expected = naive.ambiguity_threshold(entropy, correct, risk, quantile)
    assert ambiguity_threshold(entropy, correct, risk=risk, quantile=quantile) == pytest.approx(expected)
