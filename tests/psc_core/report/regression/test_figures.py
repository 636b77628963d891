"""The figures of a regression draw the numbers that they are given, beside naive loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from psc_core.answers import RegressionPolicy, Target
from psc_core.bundle import Bundle, read_bundle
from psc_core.report import regression
from psc_core.report.content import Content, Role, facts_of
from psc_core.report.regression import RegressionSet
from psc_core.tasks.regression import Calibration, fit_calibration
from tests.psc_core.report.support import value_set

ANGLE = Target(name="angle", unit="degrees")


def random_set(n: int, seed: int = 0) -> RegressionSet:
    """Numbers with noise of the predicted deviation."""
    generator = torch.Generator().manual_seed(seed)
    mean, noise, scores = torch.randn(3, n, generator=generator)
    deviation = 0.5 + torch.rand(n, generator=generator)
    return RegressionSet(
        "test", Role.TEST, scores, mean, deviation, mean.double() + deviation.double() * noise.double()
    )


def calibration_of(images: RegressionSet) -> Calibration:
    return fit_calibration(images.ood_score, images.mean, images.deviation, images.values)


def line(drawn: Figure, label: str) -> tuple[Any, Any]:
    (found,) = (each for each in drawn.axes[0].lines if each.get_label() == label)
    return found.get_data()


def test_coverage_counts_what_the_intervals_hold() -> None:
    images, calibration = random_set(200), calibration_of(random_set(40, seed=1))
    drawn = regression.coverage(images, calibration)
    triples = list(zip(images.values.tolist(), images.mean.tolist(), images.deviation.tolist(), strict=True))

    def held(half: float) -> float:
        return sum(abs(y - mean) <= half * deviation for y, mean, deviation in triples) / len(triples)

    x, y = line(drawn, "stated intervals")
    residuals = sorted(calibration.residuals.tolist())
    assert x == pytest.approx([k / 20 for k in range(1, 20)])
    assert y == pytest.approx([held(residuals[math.ceil(41 * k / 20 - 1e-9) - 1]) for k in range(1, 20)])
    x, y = line(drawn, "normal distribution")
    assert y == pytest.approx([held(NormalDist().inv_cdf((1 + c) / 2)) for c in x.tolist()])


def test_calibration_images_are_on_the_diagonal() -> None:
    images = random_set(999)
    x, y = line(regression.coverage(images, calibration_of(images)), "stated intervals")
    assert np.abs(x - y).max() < 0.0011


def test_no_more_is_stated_than_the_calibration_images_allow() -> None:
    x, _ = line(regression.coverage(random_set(9), calibration_of(random_set(9))), "stated intervals")
    assert x.max() == pytest.approx(0.9)


def test_error_coverage_leaves_the_most_uncertain_out() -> None:
    images = random_set(50)
    drawn = regression.error_coverage(images, ANGLE)
    errors = (images.values - images.mean.double()).tolist()
    for label, key in (("by predicted deviation", images.deviation.tolist()), ("if the errors were known", errors)):
        order = sorted(range(50), key=lambda i: abs(key[i]))
        expected = [math.sqrt(sum(errors[i] ** 2 for i in order[:k]) / k) for k in range(1, 51)]
        x, y = line(drawn, label)
        assert x == pytest.approx([k / 50 for k in range(1, 51)]) and y == pytest.approx(expected)
    assert drawn.axes[0].get_ylabel() == "RMSE of these, degrees"


def test_predictions_are_a_point_an_image() -> None:
    images = value_set("test", Role.TEST, [0.0, 0.0, 0.0])
    x, y = regression.predictions(images, ANGLE).axes[0].lines[1].get_data()
    assert list(x) == [0, 1, 2] and list(y) == [1, 2, 3]


def test_deviations_have_the_limit_of_the_policy(angle_bundle: Path) -> None:
    bundle = read_bundle(angle_bundle)
    images = value_set("test", Role.TEST, [0.0] * 5)  # Deviations 1, 1.5, …, 3.
    deviations = Calibration.from_tensors(bundle.parts["calibration"]).quantile(0.9)
    policy = RegressionPolicy(alpha=0.05, coverage=0.9, max_width=2 * 1.75 * deviations)
    limited = Bundle(bundle.path, bundle.manifest.model_copy(update={"policy": policy}), bundle.parts)
    drawn = regression.RegressionTaskReport().draw(facts_of(limited, Content(bundle.manifest.version, (images,))))
    assert set(drawn) == {"deviations", "predictions", "coverage", "error-coverage"}
    assert drawn["deviations"] is not None
    assert [text.get_text() for text in drawn["deviations"].axes[0].texts] == ["60.0% above"]
    assert str(drawn["deviations"].axes[0].get_xlabel()).startswith("predicted deviation, degrees")
