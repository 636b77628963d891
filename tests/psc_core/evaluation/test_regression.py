"""A regression measured on test images, beside the same numbers from its predictions."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import PRESETS, PSCRegressor, metrics, open_dataset
from psc_core.answers import Target
from psc_core.cli.evaluate import main
from psc_core.compute import Compute
from psc_core.errors import DataError, UsageError
from psc_core.evaluation.evaluate import evaluate, seen_warning
from psc_core.evaluation.regression import RegressionEvaluator, RegressionReport
from tests.conftest import TinyJob

ALLOW = ("tests.tiny:network",)


@pytest.fixture(scope="module")
def model(angle_bundle: Path) -> PSCRegressor:
    return PSCRegressor.load(angle_bundle, device="cpu", allow_factories=ALLOW)


def test_equals_the_predictions(model: PSCRegressor, data_root: Path) -> None:
    turned, shirts = (
        open_dataset(f"{name}:{data_root}", split="test", preprocess=model.preprocess).subset(torch.arange(300))
        for name in ("rotated-mnist", "fashion-mnist")
    )
    widths = model.predict(next(turned.batches(300)).images).interval.diff(dim=1)
    policy = model.policy.model_copy(update={"max_width": float(widths.median())})
    model = replace(model, policy=policy)
    report = evaluate(model, turned, {"shirts": shirts}, batch_images=70).report
    assert isinstance(report, RegressionReport)
    got, far = (model.predict(next(data.batches(300)).images) for data in (turned, shirts))
    y = turned.values
    assert y is not None
    deviation = torch.hypot(got.aleatoric, got.epistemic)
    assert report.errors["rmse"] == pytest.approx(metrics.rmse(got.mean, y), rel=1e-5)
    assert report.errors["crps"] == pytest.approx(metrics.crps(got.mean, deviation, y), rel=1e-5)
    missed = (y < got.interval[:, 0]) | (y > got.interval[:, 1])
    assert (report.misses.count, report.misses.nominal) == (int(missed.sum()), pytest.approx(0.1))
    assert report.false_alarms.count == int(got.is_ood.sum())
    assert report.auroc["shirts"] == pytest.approx(metrics.auroc(got.ood_score, far.ood_score), abs=1e-6)
    assert report.flagged["shirts"] == pytest.approx(float(far.is_ood.double().mean()))
    accepted = torch.tensor([decision == "accept" for decision in got.decision])
    assert 0 < report.accepted == int(accepted.sum()) < int((~got.is_ood).sum())
    assert report.accepted_rmse == pytest.approx(metrics.rmse(got.mean[accepted], y[accepted]), rel=1e-5)


def test_warns_of_images_of_the_fit(model: PSCRegressor, data_root: Path) -> None:
    for split, seen in (("val", True), ("test", False)):
        data = RegressionEvaluator().open_images(model, f"rotated-mnist:{data_root}", split=split)
        assert ("are validation images of the model" in seen_warning(model, data, {})) == seen


def test_command_line_writes_what_it_prints(
    angle_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--bundle", str(angle_bundle), "--id", f"rotated-mnist:{data_root}", "--out", str(tmp_path)]
    flags += ["--ood", f"shirts=fashion-mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    assert main(flags) == 0
    printed, written = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    for text in ((tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text(), printed):
        assert re.search(rf"RMSE\W.*?{written['errors']['rmse']:.4g}\b", text, re.DOTALL)
        assert "target 10 %" in text and f"{written['misses']['count']} of {written['images']}" in text
    assert f"RMSE {written['errors']['rmse']:.4g} degrees, R²" in printed
    assert f"An interval is {written['width']:.4g} degrees wide" in printed
    images = f"rotated-mnist:{data_root}"
    assert main([*flags, "--overwrite", "--weights", "w", "--train", images, "--val", images]) == 2
    assert "a regression has no baselines" in capsys.readouterr().err


def test_other_images_are_refused(model: PSCRegressor, data_root: Path) -> None:
    digits = open_dataset(f"mnist:{data_root}", split="test", preprocess=model.preprocess)
    turned = open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=model.preprocess)
    other = open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=replace(PRESETS["mnist"], mean=(0.5,)))
    with pytest.raises(DataError, match="target='angle', unit='degrees'"):
        evaluate(model, digits, {})
    with pytest.raises(DataError, match="got angle, radians"):
        evaluate(model, replace(turned, target=Target(name="angle", unit="radians")), {})
    with pytest.raises(UsageError, match="model's preprocessing"):
        RegressionEvaluator().score_images(model, other)


def test_the_original_network_is_measured_beside_its_regression(
    angle_job: TinyJob, model: PSCRegressor, data_root: Path
) -> None:
    data = open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=model.preprocess)
    compute = Compute(torch.device("cpu"), batch_images=16)
    own = RegressionEvaluator().original_network(angle_job.net, data, compute)
    evaluator = RegressionEvaluator()
    quality = evaluator.quality_of(evaluator.score_images(model, data, own, batch_images=16), data)
    with torch.no_grad():
        numbers = angle_job.net(data.preprocess.standardise(next(data.batches(len(data))).images))[:, 0]
    assert data.values is not None
    errors = [(a - b) ** 2 for a, b in zip(numbers.tolist(), data.values.tolist(), strict=True)]
    assert quality["original"] == {"rmse": pytest.approx(math.sqrt(sum(errors) / len(errors)), rel=1e-5)}
    alone = evaluator.quality_of(evaluator.score_images(model, data, batch_images=16), data)
    assert quality["psc"] == alone["psc"]
