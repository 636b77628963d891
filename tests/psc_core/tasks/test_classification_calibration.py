"""The calibration of a classifier: prediction sets, what a policy means, storage."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.answers import ClassificationPolicy
from psc_core.errors import BundleError, UsageError
from psc_core.tasks.classification import Calibration, fit_calibration
from tests.psc_core.tasks.classification_support import calibrate, prediction_sets
from tests.reference import calibration as naive


def test_thresholds_of_a_policy() -> None:
    fitted = calibrate(99)
    thresholds = fitted.thresholds(ClassificationPolicy(alpha=0.05, ambiguity_threshold=1.0, coverage=0.9))
    assert thresholds.ood_p_value == pytest.approx(5.5 / 100)
    assert thresholds.quantile == fitted.quantile(0.9)
    assert fitted.ood_score_threshold(0.05) == sorted(fitted.ood_scores.tolist())[-5]
    with pytest.raises(UsageError, match="expected alpha"):
        fitted.thresholds(ClassificationPolicy(alpha=0.001, ambiguity_threshold=1.0, coverage=0.9))


@given(st.integers(0, 2**16), st.integers(5, 40), st.integers(50, 83))
def test_prediction_sets_match_the_definition(seed: int, n: int, percent: int) -> None:
    random = torch.Generator().manual_seed(seed)
    probabilities = (torch.randint(0, 4, (n, 3), generator=random) + 0.5).float()
    probabilities /= probabilities.sum(1, keepdim=True)
    labels = torch.randint(0, 3, (n,), generator=random)
    fitted = fit_calibration(torch.zeros(n), torch.zeros(n), probabilities, labels)
    true = probabilities.gather(1, labels[:, None])[:, 0].tolist()
    got = prediction_sets(fitted.quantile(percent / 100), probabilities)
    for row, members in zip(probabilities.tolist(), got, strict=True):
        assert set(members.nonzero()[:, 0].tolist()) == naive.prediction_set(true, row, Fraction(percent, 100))


def test_a_tiny_coverage_has_the_largest_quantile() -> None:
    fitted = calibrate(30)
    assert fitted.quantile(1e-14) == float(fitted.label_probabilities[-1])


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
        sets = prediction_sets(fitted.quantile(0.9), probabilities[300:])
        hit = sets.gather(1, labels[300:, None])[:, 0]
        covered.append(float(hit.float().mean()))
        assert sets.any(1).all()
    assert sum(covered) / len(covered) == pytest.approx(0.9, abs=0.008)


def test_quantiles_of_the_entropies() -> None:
    entropies = torch.rand(99).sort().values
    quantiles = replace(calibrate(99), entropies=entropies).entropy_quantiles()
    assert quantiles == pytest.approx(np.percentile(entropies.double().numpy(), range(101)).tolist(), abs=1e-6)


@given(st.floats(-2, 5, width=32))
def test_a_policy_with_another_threshold_promises_what_its_images_show(threshold: float) -> None:
    fitted = replace(calibrate(3), entropies=torch.tensor([0.0, 0.5, 1.0]), error_bounds=torch.tensor([1.0, 0.2, 0.1]))
    policy = ClassificationPolicy(alpha=0.5, ambiguity_threshold=0.7, coverage=0.5, risk=0.03)
    expected = {0: None, 1: None, 2: 0.2, 3: 0.1}[sum(threshold >= entropy for entropy in (0.0, 0.5, 1.0))]
    changed = fitted.changed(policy, {"ambiguity_threshold": threshold})
    assert changed.model_dump()["risk"] == (expected and pytest.approx(expected))
    assert fitted.changed(policy, {"alpha": 0.1}).model_dump()["risk"] == 0.03


def test_rejects_unattainable_coverage() -> None:
    with pytest.raises(UsageError, match=r"coverage ≤ n/\(n \+ 1\)"):
        calibrate(200).quantile(0.999)
    with pytest.raises(UsageError, match="between 0 and 1"):
        calibrate(200).quantile(1.5)


def test_tensors_round_trip() -> None:
    fitted = calibrate()
    again = Calibration.from_tensors(fitted.tensors())
    assert len(again) == 200
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in fitted.tensors().items())
    assert all(fitted.tensors()[name].dtype == torch.float32 for name in ("ood_scores", "entropies"))


def test_rejects_unusable_tensors() -> None:
    tensors = calibrate().tensors()
    bad = {
        "missing": {name: tensor for name, tensor in tensors.items() if name != "ood_scores"},
        "float64": {**tensors, "ood_scores": tensors["ood_scores"].double()},
        "descending": {**tensors, "ood_scores": tensors["ood_scores"].flip(0)},
        "short": {**tensors, "entropies": tensors["entropies"][:-1]},
        "NaN": {**tensors, "entropies": tensors["entropies"] * math.nan},
        "labels": {**tensors, "labels": tensors["labels"] + 3},
        "one label": {**tensors, "labels": torch.tensor(1)},
        "pairs of labels": {**tensors, "labels": tensors["labels"][:, None]},
        "no bounds": {name: tensor for name, tensor in tensors.items() if name != "error_bounds"},
        "bounds above 1": {**tensors, "error_bounds": tensors["error_bounds"] + 1},
        "NaN bounds": {**tensors, "error_bounds": tensors["error_bounds"] * math.nan},
        "entropies below 0": {**tensors, "entropies": tensors["entropies"] - 1},
        "probabilities above 1": {**tensors, "label_probabilities": tensors["label_probabilities"] + 1},
        "scores of no density": {**tensors, "ood_scores": tensors["ood_scores"] * 1e30},
        "label type": {**tensors, "labels": tensors["labels"].float()},
    }
    for tensors in bad.values():
        with pytest.raises(BundleError, match="expected"):
            Calibration.from_tensors(tensors)


def test_rejects_scores_of_other_classes() -> None:
    calibrate().check_classes(calibrate().num_classes)
    with pytest.raises(BundleError, match="calibration of 7 classes"):
        calibrate().check_classes(7)


def test_rejects_another_type_of_num_classes() -> None:
    tensors = calibrate().tensors()
    with pytest.raises(BundleError, match=r"int64 num_classes .* got torch\.int32"):
        Calibration.from_tensors({**tensors, "num_classes": tensors["num_classes"].int()})


def test_prediction_sets_are_those_of_mapie() -> None:
    """Its LAC score is that of the module's text; the most probable class, always in ours, may be missing there."""
    mapie, sklearn = pytest.importorskip("mapie.classification"), pytest.importorskip("sklearn.base")
    random, n, classes = torch.Generator().manual_seed(0), 237, 5
    probabilities = (2 * torch.randn(2 * n, classes, generator=random)).softmax(1).double()
    labels = torch.multinomial(probabilities, 1, generator=random)[:, 0]

    class Given(sklearn.ClassifierMixin, sklearn.BaseEstimator):  # type: ignore[name-defined,misc]
        """A classifier whose inputs are the probabilities."""

        classes_ = np.arange(classes)
        fitted_ = True

        def fit(self, x: object, y: object) -> Given:
            return self

        def predict_proba(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
            return np.asarray(x)

        def predict(self, x: npt.ArrayLike) -> npt.NDArray[np.int64]:
            return np.asarray(x).argmax(1)

    split = mapie.SplitConformalClassifier(Given(), confidence_level=0.9, conformity_score="lac", prefit=True)
    split.conformalize(probabilities[:n].numpy(), labels[:n].numpy())
    expected = split.predict_set(probabilities[n:].numpy())[1][:, :, 0]
    fitted = fit_calibration(torch.zeros(n), torch.zeros(n), probabilities[:n].float(), labels[:n])
    found = probabilities[n:].float().numpy() >= fitted.quantile(0.9)
    assert (found == expected).mean() > 0.998 and found.mean() < 0.7  # Float32 may round a tie.
