"""The report of a regression: what it keeps of images, its figures beside naive loops, its bundle's facts."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from psc_core import PSCRegressor, open_dataset
from psc_core.answers import REGRESSION_SCORES, RegressionPolicy, Target
from psc_core.bundle import Bundle, read_bundle
from psc_core.evaluation.regression import RegressionEvaluator
from psc_core.report import tasks
from psc_core.report.content import Content, Role, facts_of
from psc_core.report.tasks import RegressionSet
from psc_core.tasks.base import Outputs
from psc_core.tasks.regression import ABSTAIN_UNCERTAIN, Calibration, fit_calibration
from tests.psc_core.report.support import value_content, value_set


def test_numbers_of_out_of_distribution_images_are_no_truth(angle_bundle: Path, data_root: Path) -> None:
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    data = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=model.preprocess)
    scored = RegressionEvaluator().score_images(model, data)
    assert len(tasks.RegressionTaskReport().scored_set("test", Role.TEST, data, scored).values) == len(data)
    outside = tasks.RegressionTaskReport().scored_set("others", Role.OOD, data, scored)
    assert len(outside.values) == 0 and outside.quality == {}
    assert tasks.RegressionTaskReport().pictures_of(data, scored) == ()


ANGLE = Target(name="angle", unit="degrees")


def random_set(n: int, seed: int = 0) -> RegressionSet:
    """Numbers with noise of the predicted deviation."""
    generator = torch.Generator().manual_seed(seed)
    mean, noise, scores = torch.randn(3, n, generator=generator)
    deviation = 0.5 + torch.rand(n, generator=generator)
    values = mean.double() + deviation.double() * noise.double()
    return RegressionSet("test", Role.TEST, scores, mean, deviation, values)


def calibration_of(images: RegressionSet) -> Calibration:
    return fit_calibration(images.ood_score, images.mean, images.deviation, images.values)


def line(drawn: Figure, label: str) -> tuple[Any, Any]:
    (found,) = (each for each in drawn.axes[0].lines if each.get_label() == label)
    return found.get_data()


def test_a_report_judges_as_the_service_decides() -> None:
    """Around 1e7 float32 has whole numbers alone, to which ends are rounded outward."""
    images = random_set(300)
    images = replace(images, mean=images.mean + 1e7, values=(images.values + 1e7).round())
    calibration, policy = calibration_of(images), RegressionPolicy(alpha=0.05, max_width=4.0, coverage=0.9)
    packed = torch.zeros(300, len(REGRESSION_SCORES))
    for name, column in (("mean", images.mean), ("aleatoric", images.deviation), ("ood_p_value", torch.ones(300))):
        packed[:, REGRESSION_SCORES.index(name)] = column
    decided = calibration.decide(Outputs(packed.numpy(), REGRESSION_SCORES, ()), policy)
    unclear, wrong = tasks.RegressionTaskReport().judge(images, policy, calibration)
    assert unclear.tolist() == (decided.decision == ABSTAIN_UNCERTAIN).tolist() and 0 < unclear.sum() < 300
    y = images.values.numpy()
    assert wrong.tolist() == ((y < decided.lower) | (y > decided.upper)).tolist()


def test_coverage_counts_what_the_intervals_hold() -> None:
    images, calibration = random_set(200), calibration_of(random_set(40, seed=1))
    drawn = tasks.coverage(images, calibration)
    triples = list(zip(images.values.tolist(), images.mean.tolist(), images.deviation.tolist(), strict=True))

    def held(half: float) -> float:
        return sum(abs(y - mean) <= half * deviation for y, mean, deviation in triples) / len(triples)

    x, y = line(drawn, "stated intervals")
    residuals = sorted(calibration.residuals.tolist())
    assert x == pytest.approx([k / 20 for k in range(1, 20)])
    assert y == pytest.approx([held(residuals[math.ceil(41 * k / 20 - 1e-9) - 1]) for k in range(1, 20)])
    x, y = line(drawn, "normal distribution")
    assert y == pytest.approx([held(NormalDist().inv_cdf((1 + c) / 2)) for c in x.tolist()])


def test_calibration_images_are_on_the_diagonal_and_end_it() -> None:
    images = random_set(999)
    x, y = line(tasks.coverage(images, calibration_of(images)), "stated intervals")
    assert np.abs(x - y).max() < 0.0011
    x, _ = line(tasks.coverage(random_set(9), calibration_of(random_set(9))), "stated intervals")
    assert x.max() == pytest.approx(0.9)  # No more is stated than the calibration images allow.


def test_error_coverage_leaves_the_most_uncertain_out() -> None:
    images = random_set(50)
    drawn = tasks.error_coverage(images, ANGLE)
    errors = (images.values - images.mean.double()).tolist()
    for label, key in (("by predicted deviation", images.deviation.tolist()), ("if the errors were known", errors)):
        order = sorted(range(50), key=lambda i: abs(key[i]))
        expected = [math.sqrt(sum(errors[i] ** 2 for i in order[:k]) / k) for k in range(1, 51)]
        x, y = line(drawn, label)
        assert x == pytest.approx([k / 50 for k in range(1, 51)]) and y == pytest.approx(expected)
    equal = tasks.error_coverage(replace(images, deviation=torch.ones(50)), ANGLE)
    assert line(equal, "by predicted deviation")[1] == pytest.approx([expected[-1]] * 50)


def test_predictions_are_a_point_an_image() -> None:
    images = value_set("test", Role.TEST, [0.0, 0.0, 0.0])
    x, y = tasks.predictions(images, ANGLE).axes[0].lines[1].get_data()
    assert list(x) == [0, 1, 2] and list(y) == [1, 2, 3]


def test_deviations_have_the_limit_of_the_policy(angle_bundle: Path) -> None:
    bundle = read_bundle(angle_bundle)
    images = value_set("test", Role.TEST, [0.0] * 5)  # Deviations 1, 1.5, …, 3.
    deviations = Calibration.from_tensors(bundle.parts["calibration"]).quantile(0.9)
    policy = RegressionPolicy(alpha=0.05, coverage=0.9, max_width=2 * 1.75 * deviations)
    limited = Bundle(bundle.path, bundle.manifest.model_copy(update={"policy": policy}), bundle.parts)
    drawn = tasks.RegressionTaskReport().draw(facts_of(limited, Content(bundle.manifest.version, (images,))))
    assert set(drawn) == {"deviations", "predictions", "coverage", "error-coverage"}
    assert drawn["deviations"] is not None
    assert [text.get_text() for text in drawn["deviations"].axes[0].texts] == ["60.0% above"]


def test_facts_of_a_regression(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    found = facts_of(read_bundle(angle_bundle), value_content(manifest.version))
    text = found.to_text()
    rows = [line.split() for line in text.splitlines()]
    assert ["the", "original", "network", "2", "–", "–", "–"] in rows
    assert ["with", "PSC", "1", "0.5", "1.25", "0.75"] in rows
    assert "less accurate" not in text
    assert found.flagged_as(Role.OOD)["clothes"] == sum(score > found.ood_threshold for score in (7.0, 8.0, 9.0)) / 3


def test_an_interval_is_too_wide_above_a_deviation(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    found = facts_of(read_bundle(angle_bundle), value_content(manifest.version))
    policies = (RegressionPolicy(alpha=0.05, coverage=0.9, max_width=width) for width in (40.0, None))
    limited, unlimited = (
        replace(found, manifest=manifest.model_copy(update={"policy": policy})) for policy in policies
    )
    assert unlimited.limits == {"deviations": None}
    residuals = sorted(read_bundle(angle_bundle).parts["calibration"]["residuals"].tolist())
    rank = next(k for k in range(1, len(residuals) + 1) if k >= (len(residuals) + 1) * 0.9 - 1e-9)
    assert limited.limits["deviations"] == pytest.approx(40 / (2 * residuals[rank - 1]))
    assert "40 degrees" in limited.to_text()


def test_warns_where_a_regression_loses_accuracy(angle_bundle: Path) -> None:
    version = read_bundle(angle_bundle).manifest.version
    for own_rmse, is_said in ((0.9, True), (0.97, False)):
        images = value_set("validation", Role.VALIDATION, [0.0] * 3, own_rmse=own_rmse)
        text = facts_of(read_bundle(angle_bundle), Content(version, (images,))).to_text()
        assert ("by 11% of its RMSE" in text) == is_said


def test_a_regression_without_images_has_the_recorded_quality(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    text = facts_of(read_bundle(angle_bundle), Content(manifest.version)).to_text()
    shown = [f"{manifest.metrics[name]:.4g}" for name in ("rmse", "r2", "nll_nats", "crps")]
    assert text.splitlines()[2].split() == ["with", "PSC", *shown]
