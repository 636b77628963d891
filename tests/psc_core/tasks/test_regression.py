"""A regression: its answers, intervals, decisions, bins and first evaluation."""

from __future__ import annotations

import math
import re
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from psc_core import FitSettings
from psc_core.answers import (
    REGRESSION_DECISIONS,
    REGRESSION_SCORES,
    RegressionAnswer,
    RegressionExplanation,
    RegressionPolicy,
    Target,
)
from psc_core.errors import BundleError, DataError, FitError, UsageError
from psc_core.heads.base import Scored
from psc_core.tasks.base import Outputs
from psc_core.tasks.regression import (
    Calibration,
    Regression,
    calibration_metrics,
    fit_calibration,
    label_in_bins,
    network_rmse,
    quantile_edges,
    width_without_image,
)
from tests.conftest import TinyJob
from tests.decisions import Decider
from tests.opened import opened
from tests.psc_core.data.test_dataset import numbers
from tests.psc_core.heads.regressions import fit_head, images

TASK = Regression(target=Target(name="angle", unit="degrees"))
ROWS = [[10.0, 3.0, 4.0, -1.0, 1.0, 0.5, 0.125], [-2.0, 0.5, 0.0, -9.0, 9.0, 0.01, 0.25], [1.0, 6.0, 8.0, 0, 0, 1, 1]]


def read(documents: list[dict[str, Any]]) -> Any:
    """The documents as a client reads them."""
    return orjson.loads(orjson.dumps(documents, option=orjson.OPT_SERIALIZE_NUMPY))


def test_equals_the_naive_document() -> None:
    outputs = Outputs(np.array(ROWS, np.float32), REGRESSION_SCORES, ("texture",))
    policy = RegressionPolicy(alpha=0.05, max_width=25.0, coverage=0.9)
    decided = Decider(policy, 2.0).decide(outputs)
    documents = read(decided.documents(outputs, ("a", "b")))
    decisions = ("accept", "abstain_ood", "abstain_uncertain")
    for document, values, decision in zip(documents, ROWS, decisions, strict=True):
        mean, half = values[0], 2 * np.hypot(values[1], values[2])
        expected = {
            **dict(zip(REGRESSION_SCORES, values, strict=False)),
            "lower": mean - half,
            "upper": mean + half,
            "checks": {"texture": values[-1]},
            "is_ood": values[5] <= 0.05,
            "decision": decision,
        }
        assert document == expected and list(document) == list(expected)
        assert RegressionAnswer.model_validate(document).model_dump(exclude_none=True) == document


def test_explanation_names_the_nearest_examples_of_each_layer() -> None:
    explanation = {
        "nearest_class": np.array([1]),
        "class_distances": np.array([[3.0, 1.0]], np.float32),
        "component_deviation": np.array([[0.5, -4.0]], np.float32),
    }
    near = {
        "layer_weight": np.array([[0.75, 0.25]], np.float32),
        "neighbour_image": np.array([[[7, 3], [5, 7]]]),
        "neighbour_value": np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32),
        "neighbour_distance": np.array([[[0.5, 1.5], [0.25, 2.0]]], np.float32),
    }
    (plain,) = read(TASK.explanations(explanation, ("a", "b"), ("z",)))
    assert plain["nearest_bin"] == "b" and "nearest_examples" not in plain
    (told,) = read(TASK.explanations({**explanation, **near}, ("a", "b"), ("z", "layer1")))
    layers = RegressionExplanation.model_validate(told).nearest_examples
    assert layers is not None
    assert [(each.layer, each.weight) for each in layers] == [("z", 0.75), ("layer1", 0.25)]
    assert [(each.image, each.value, each.distance) for each in layers[1].examples] == [(5, 3.0, 0.25), (7, 4.0, 2.0)]


def calibration(n: int, seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    mean, deviation = torch.randn(n, generator=generator), 1 + torch.rand(n, generator=generator)
    values = mean + 2 * deviation * torch.randn(n, generator=generator)
    return fit_calibration(torch.randn(n, generator=generator), mean, deviation, values)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_deviations_equal_their_definition(n: int, coverage: float) -> None:
    fitted = calibration(n)
    rank = math.ceil((n + 1) * coverage - 1e-9)
    if rank > n:
        with pytest.raises(UsageError, match="expected coverage"):
            fitted.quantile(coverage)
    else:
        assert fitted.quantile(coverage) == sorted(fitted.residuals.tolist())[rank - 1]


def test_a_tiny_coverage_has_the_narrowest_interval() -> None:
    fitted = calibration(30)
    assert fitted.quantile(1e-14) == float(fitted.residuals[0])


def test_residuals_are_in_standard_deviations() -> None:
    fitted = fit_calibration(
        torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.5]), torch.tensor([3.0, -1.0])
    )
    assert (fitted.ood_scores.tolist(), fitted.residuals.tolist()) == ([1.0, 2.0], [1.5, 2.0])


def test_a_policy_that_so_few_images_cannot_keep() -> None:
    fitted = calibration(99)
    fitted.check(RegressionPolicy(alpha=0.05, max_width=3.0, coverage=0.9))
    with pytest.raises(UsageError, match="expected alpha"):
        fitted.check(RegressionPolicy(alpha=0.001, max_width=None, coverage=0.9))


def test_survives_a_bundle() -> None:
    fitted = calibration(20)
    again = Calibration.from_tensors(fitted.tensors())
    assert torch.equal(again.residuals, fitted.residuals) and torch.equal(again.ood_scores, fitted.ood_scores)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"residuals": None}, "expected calibration tensors"),
        ({"residuals": torch.tensor([2.0, 1.0])}, "expected ascending"),
        ({"residuals": torch.tensor([1.0])}, "of one length"),
        ({"residuals": torch.tensor([-1.0, 1.0])}, "expected calibration residuals from 0"),
        ({"ood_scores": torch.tensor([0.0, 3e38])}, "expected calibration ood_scores"),
        ({"ood_scores": torch.tensor([0.0, float("nan")])}, "expected ascending finite"),
        ({"ood_scores": torch.tensor([0.0, 1.0]).double()}, "float32"),
    ],
)
def test_rejects_other_tensors(changes: dict[str, torch.Tensor | None], said: str) -> None:
    whole = {"ood_scores": torch.tensor([0.0, 1.0]), "residuals": torch.tensor([0.0, 1.0])}
    with pytest.raises(BundleError, match=said):
        Calibration.from_tensors({k: v for k, v in (whole | changes).items() if v is not None})


def test_scores_that_are_not_finite_are_refused() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    with pytest.raises(FitError, match="finite residuals"):
        fit_calibration(one, one, zero, one)
    with pytest.raises(FitError, match="finite OOD scores"):
        fit_calibration(one / 0, one, one, one)


@pytest.mark.parametrize(("own", "is_refused"), [(100, True), (60, True), (40, False), (0, False)])
def test_predictions_in_place_of_measured_numbers_are_refused(own: int, is_refused: bool) -> None:
    random = torch.Generator().manual_seed(0)
    mean, error = 50 + 10 * torch.randn(100, generator=random), torch.randn(100, generator=random)
    error[:own] *= 1e-6  # Another batch size may round otherwise.
    values = mean.double() + 3 * error.double()
    scored = Scored({"mean": mean, "aleatoric": torch.full((100,), 3.0), "epistemic": torch.zeros(100)}, mean[:, None])
    of, settings = numbers(values.tolist()), FitSettings(task="regression", device="cpu")
    if is_refused:
        with pytest.raises(DataError, match=rf"{own} of 100 numbers are what the model predicts.*measured numbers"):
            Regression.calibrate(scored, torch.zeros(100), of, settings)
    else:
        assert Regression.calibrate(scored, torch.zeros(100), of, settings).calibration.quantile(0.95) > 1


def test_a_constant_that_is_mostly_right_is_no_copy_of_the_predictions() -> None:
    """As of a network whose last layer lets no number below 0, where most are 0."""
    mean = torch.cat([torch.zeros(60), torch.linspace(1, 9, 40)])
    values = mean.double() + torch.cat([torch.zeros(60), torch.ones(40)]).double()
    scored = Scored({"mean": mean, "aleatoric": torch.ones(100), "epistemic": torch.zeros(100)}, mean[:, None])
    of, settings = numbers(values.tolist()), FitSettings(task="regression", device="cpu")
    assert Regression.calibrate(scored, torch.zeros(100), of, settings).calibration.quantile(0.95) == 1
    with pytest.raises(DataError, match="60 of 100 numbers are what the model predicts"):
        Regression.calibrate(scored, torch.zeros(100), of, settings.changed({"coverage": 0.5}))


@pytest.mark.parametrize("step", [1.0, 0.1, 10.0])
def test_a_network_that_rounds_is_no_copy_either(step: float) -> None:
    random = torch.Generator().manual_seed(0)
    mean = step * torch.randint(20, (100,), generator=random).float()
    values = mean.double() + 3 * step * (torch.arange(100) >= 85)
    scored = Scored({"mean": mean, "aleatoric": torch.ones(100) * step, "epistemic": torch.zeros(100)}, mean[:, None])
    settings = FitSettings(task="regression", device="cpu")
    calibrated = Regression.calibrate(scored, torch.zeros(100), numbers(values.tolist()), settings)
    assert calibrated.calibration.quantile(0.95) == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (None, ["accept", "accept", "abstain_ood", "abstain_ood"]),
        (25.0, ["accept", "abstain_uncertain", "abstain_ood", "abstain_ood"]),
        (20.0, ["accept", "abstain_uncertain", "abstain_ood", "abstain_ood"]),
        (19.0, ["abstain_uncertain", "abstain_uncertain", "abstain_ood", "abstain_ood"]),
    ],
)
def test_the_policy_decides(limit: float | None, names: list[str]) -> None:
    """An interval as wide as the limit is accepted, a p-value equal to alpha is an alarm."""
    columns = {
        "mean": [10.0, -4.0, 1.0, 1.0], "aleatoric": [3.0, 6.0, 3.0, 60.0], "epistemic": [4.0, 8.0, 4.0, 80.0],
        "log_density": [0.0] * 4, "ood_score": [0.0] * 4, "ood_p_value": [0.9, 0.9, 0.05, 0.01],
    }  # fmt: skip
    outputs = Outputs(np.array([columns[name] for name in REGRESSION_SCORES], np.float32).T, REGRESSION_SCORES, ())
    policy = RegressionPolicy(alpha=0.05, max_width=limit, coverage=0.9)
    decisions = Decider(policy, 2.0).decide(outputs)
    assert [REGRESSION_DECISIONS[code] for code in decisions.decision] == names
    assert decisions.lower.tolist() == [0.0, -24.0, -9.0, -199.0]
    assert decisions.upper.tolist() == [20.0, 16.0, 11.0, 201.0]
    assert decisions.is_ood.tolist() == [False, False, True, True]


@pytest.mark.parametrize(("mean", "deviation"), [(1e6, 0.13), (40.0, 2.5), (0.0, 1.0)])
def test_an_interval_is_as_wide_as_its_ends_are_apart(mean: float, deviation: float) -> None:
    """Whoever sees only the ends of an answer finds the same decision, however much rounding took off its width."""
    rng = np.random.default_rng(0)
    columns = np.zeros((500, len(REGRESSION_SCORES)), np.float32)
    columns[:, REGRESSION_SCORES.index("mean")] = mean * (1 + rng.uniform(0, 1e-3, 500))
    columns[:, REGRESSION_SCORES.index("aleatoric")] = deviation * rng.uniform(0.9, 1.1, 500)
    columns[:, REGRESSION_SCORES.index("ood_p_value")] = 1
    policy = RegressionPolicy(alpha=0.05, max_width=float(np.float32(2 * deviation)), coverage=0.9)
    decided = Decider(policy, 1.0).decide(Outputs(columns, REGRESSION_SCORES, ()))
    assert (decided.decision == (decided.upper - decided.lower > np.float32(2 * deviation))).all()
    assert set(decided.decision.tolist()) == {0, 1}


def test_rounding_takes_no_number_out_of_an_interval() -> None:
    columns = np.zeros((1, len(REGRESSION_SCORES)), np.float32)
    columns[0, [REGRESSION_SCORES.index(name) for name in ("mean", "aleatoric", "ood_p_value")]] = 1.7e9, 61, 1
    policy = RegressionPolicy(alpha=0.05, max_width=None, coverage=0.9)
    decided = Decider(policy, 1.0).decide(Outputs(columns, REGRESSION_SCORES, ()))
    for value in (1.7e9 - 50, 1.7e9 + 50):
        assert float(decided.lower[0]) <= value <= float(decided.upper[0])


@given(st.floats(-1e10, 1e10, width=32), st.floats(0, 1e6, width=32), st.floats(0, 1e3, width=32))
def test_ends_are_the_next_float32_outside_of_the_exact_ones(mean: float, deviation: float, quantile: float) -> None:
    columns = np.zeros((1, len(REGRESSION_SCORES)), np.float32)
    columns[0, [REGRESSION_SCORES.index(name) for name in ("mean", "aleatoric", "ood_p_value")]] = mean, deviation, 1
    policy = RegressionPolicy(alpha=0.05, max_width=None, coverage=0.9)
    calibration = Decider(policy, quantile).calibration
    decided = calibration.decide(Outputs(columns, REGRESSION_SCORES, ()), policy)
    half = Fraction(quantile) * Fraction(deviation)
    rounding = (abs(Fraction(mean)) + half) / 2**50  # of float64
    for end, exact, sign in (
        (decided.lower[0], Fraction(mean) - half, -1),
        (decided.upper[0], Fraction(mean) + half, 1),
    ):
        inward = np.nextafter(end, np.float32(-sign * np.inf))
        assert sign * (Fraction(float(end)) - exact) >= -rounding
        assert sign * (Fraction(float(inward)) - exact) < rounding


def test_a_graph_rounds_outward_too() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.cat([1.7e9 + 1e6 * torch.randn(500, generator=generator), torch.randn(500, generator=generator)])
    columns = torch.zeros(1000, len(REGRESSION_SCORES))
    columns[:, REGRESSION_SCORES.index("mean")] = mean
    columns[:, REGRESSION_SCORES.index("aleatoric")] = 0.1 + 200 * torch.rand(1000, generator=generator)
    columns[:, REGRESSION_SCORES.index("ood_p_value")] = 1
    policy = RegressionPolicy(alpha=0.05, max_width=256.0, coverage=0.9)
    calibration = Calibration(torch.arange(999.0), torch.ones(999))
    decided = calibration.decide(Outputs(columns.numpy(), REGRESSION_SCORES, ()), policy)
    scores = dict(zip(REGRESSION_SCORES, columns.T, strict=True))
    thresholds = {name: torch.tensor(float(value)) for name, value in policy.model_dump().items()}
    found = calibration.decide_in_graph(scores, torch.empty(1000, 0), thresholds)
    for name in ("lower", "upper"):
        np.testing.assert_array_equal(found[name][:500].numpy(), getattr(decided, name)[:500])
        np.testing.assert_allclose(found[name].numpy(), getattr(decided, name), rtol=1e-6, atol=1e-4)
    assert found["decision"].tolist() == decided.decision.tolist()
    found = calibration.decide_in_graph(scores, torch.empty(1000, 0), thresholds | {"coverage": torch.tensor(0.9999)})
    assert (found["lower"] == -torch.inf).all() and (found["upper"] == torch.inf).all()
    assert (found["decision"] == REGRESSION_DECISIONS.index("abstain_uncertain")).all()


def test_limits_and_intervals_beyond_every_float32() -> None:
    columns = np.ones((2, len(REGRESSION_SCORES)), np.float32)
    columns[1, [REGRESSION_SCORES.index("mean"), REGRESSION_SCORES.index("aleatoric")]] = 0, 1e30
    outputs = Outputs(columns, REGRESSION_SCORES, ())
    policy = RegressionPolicy(alpha=0.05, max_width=1e300, coverage=0.9)
    assert Decider(policy, 1.0).decide(outputs).decision.tolist() == [0, 0]
    decisions = Decider(policy.model_copy(update={"max_width": None}), 1e9).decide(outputs)
    assert [decisions.lower[1], decisions.upper[1]] == [-np.finfo(np.float32).max, np.finfo(np.float32).max]


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=300).filter(lambda v: sorted(v)[1] < sorted(v)[-2])
)
@example([1.0] + [2.0] * 100 + [3.0] * 99)
@example([0.0] * 98 + [1.0] + [2.0])
@example([0.0] + [1.0] * 60 + [2.0] * 2)
@example([0.0, 0.0, 1.0, 1.0])
def test_bins_part_the_numbers(values: list[float]) -> None:
    train, again = Regression.labelled(numbers(values), numbers(values))
    edges = quantile_edges(torch.tensor(values))
    assert train.labels.tolist() == [sum(value >= edge for edge in edges.tolist()) for value in values]
    counts = train.labels.bincount(minlength=len(train.classes))
    assert 2 <= len(train.classes) <= 10 and int(counts.min()) >= 2
    assert len(set(train.classes)) == len(train.classes) == len(edges) + 1
    assert torch.equal(train.labels, again.labels)


def test_many_numbers_fill_bins_alike() -> None:
    train = label_in_bins(numbers([float(i) for i in range(400)]), quantile_edges(torch.arange(400.0)))
    assert train.labels.bincount().tolist() == [40] * 10
    assert (train.classes[0], train.classes[1], train.classes[-1]) == ("below 40", "40 to 80", "360 and above")


def test_bins_have_the_digits_that_tell_them_apart() -> None:
    values = [101_300 + index / 4 for index in range(60)]
    names = label_in_bins(numbers(values), quantile_edges(torch.tensor(values, dtype=torch.float64))).classes
    assert names == ("below 101300", "101300 to 101310", "101310 and above")


@pytest.mark.parametrize("spread", [1e-16, 1e-21, 1e16, 1e30])
def test_a_spread_that_float32_cannot_square_is_refused(spread: float) -> None:
    with pytest.raises(DataError, match="give them in a unit in which they spread by 1e-15 to 1e"):
        Regression.of_images(numbers([0.0, 2 * spread, 0.0, 2 * spread]))
    assert Regression.of_images(numbers([0.0, 2e-15, 0.0, 2e-15])).target.name == "age"


@pytest.mark.parametrize(("offset", "is_said"), [(1e7, True), (1e3, False)])
def test_a_spread_that_float32_rounds_away_is_said(offset: float, is_said: bool) -> None:
    z, y = images(200, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit_head(z, offset + y / 10, z, offset + y / 10)
    assert [str(each.message).partition(";")[2] for each in said] == [" subtract 1e+07 from all numbers"] * is_said


def test_equal_numbers_calibrate_nothing() -> None:
    scored = Scored(dict.fromkeys(("mean", "aleatoric", "epistemic"), torch.ones(100)), torch.ones(100, 0))
    with pytest.raises(DataError, match="those that calibrate, of some all 100 are 5; give more"):
        Regression.calibrate(scored, torch.zeros(100), numbers([5.0] * 100), FitSettings(task="regression"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([4.0] * 30, "all are 4; nothing to fit"),
        ([0.0] * 99 + [1.0], "100 images have 2 different numbers, too"),
        ([0.0] + [1.0] * 50 + [2.0], "52 images have 3 different numbers, too"),
        ([0.0, 1.0], "2 images have 2 different numbers, too"),
        ([0.0, 1.0, 2.0], "3 images have 3 different numbers, too"),
    ],
)
def test_numbers_that_leave_a_bin_one_image_are_refused(values: list[float], said: str) -> None:
    with pytest.raises(DataError, match=said):
        quantile_edges(torch.tensor(values))


COMPUTE = FitSettings(device="cpu").compute()


def test_own_error_is_the_rmse(angle_job: TinyJob) -> None:
    turned = opened("rotated-mnist", "val")
    images = torch.cat([batch.images for batch in turned.batches(64)])
    with torch.no_grad():
        outputs = angle_job.net(turned.preprocess.standardise(images))[:, 0].tolist()
    assert turned.values is not None
    errors = [output - value for output, value in zip(outputs, turned.values.tolist(), strict=True)]
    found, predicted = network_rmse(angle_job.net, turned, COMPUTE)
    assert predicted.tolist() == pytest.approx(outputs, abs=1e-4)
    assert found == pytest.approx(math.sqrt(sum(error**2 for error in errors) / len(errors)), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "odd", "said"),
    [
        (lambda y: y / 20, None, "more than halve their error"),
        (lambda y: y + 15, None, "more than halve their error"),
        (lambda y: y, -999.0, r"a few numbers are far .*, the furthest is -999 where it says -?\d"),
        (lambda y: -y, None, "GUESSING"),
        (lambda y: y, None, ""),
    ],
)
def test_the_first_evaluation_asks_for_what_is_odd(change: Any, odd: float | None, said: str) -> None:
    random = torch.Generator().manual_seed(0)
    values = 20 * torch.randn(200, generator=random).double()
    outputs = change(values + torch.randn(200, generator=random).double()).float()
    if odd is not None:
        values[:6] = odd
    data = numbers(values.tolist())
    waiting = [*outputs, *outputs]  # of the training and of the validation images

    def net(images: torch.Tensor) -> torch.Tensor:
        return torch.stack([waiting.pop(0) for _ in images])[:, None]

    found = Regression.first_evaluation(net, data, data, COMPUTE)
    assert re.search(said, found.warning) if said else not found.warning
    assert found.rmse == pytest.approx(float((values - outputs).square().mean().sqrt()), rel=1e-5)


def test_metrics_are_those_of_the_calibration_split() -> None:
    y, mean = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    metrics = calibration_metrics(mean, torch.ones(3), y)
    assert metrics["validation_images"] == 3 and metrics["rmse"] == pytest.approx((1 / 3) ** 0.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_default_width_is_that_of_an_interval_that_looks_at_no_image(values: list[float], coverage: float) -> None:
    lower, upper = np.quantile(values, [(1 - coverage) / 2, (1 + coverage) / 2])
    width = width_without_image(torch.tensor(values, dtype=torch.float64), coverage)
    assert width == pytest.approx(upper - lower, rel=1e-9, abs=1e-9) and width > 0
