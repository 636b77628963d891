"""A bundle calibrated again on a random sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core.bundle import HISTORY
from psc_core.calibrate import Sample, read_sample, recalibrate_from_sample
from psc_core.cli.fit import main as fit
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.errors import UsageError
from psc_core.heads.softmax import TemperatureHead
from psc_core.images.preprocess import PRESETS
from psc_core.log.store import Log
from psc_core.model import FittedModel, load_model
from psc_core.scoring import dataset_outputs
from tests.conftest import TinyJob
from tests.logged import Logged, dimmed, png, write_log
from tests.reference import calibration as naive

FACTORY = "tests.tiny:network"


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> FittedModel:
    return load_model(tiny_bundle, device="cpu", allow_factories=[FACTORY])


@pytest.fixture(scope="module")
def digits(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])


@pytest.fixture(scope="module")
def log(digits: ImageDataset, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Log:
    labels = digits.first_labels().tolist()
    images = [Logged(dimmed(digits, i), "label", str(labels[i])) for i in range(200)]
    clothes = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    images += [Logged(png(clothes.image(i)[0]), "none_of_the_classes") for i in range(5)]
    return write_log(tmp_path_factory.mktemp("log"), images)


@pytest.fixture(scope="module")
def sample(log: Log, model: FittedModel) -> Sample:
    return read_sample(log, model)


def test_only_the_calibration_is_another(model: FittedModel, sample: Sample, tmp_path: Path) -> None:
    found = recalibrate_from_sample(model, sample, {"risk": 0.6})
    new = found.model
    images = next(sample.of_class.batches(len(sample.of_class))).images
    before, after = model.predict(images), new.predict(images)
    for name in ("predictive_entropy", "log_density", "ood_score", "probabilities"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    scores = after.ood_score.tolist()
    exact = [naive.weighted_p_value(scores, [1] * len(scores), score) for score in scores]
    torch.testing.assert_close(after.ood_p_value, torch.tensor([float(p) for p in exact]))
    assert new.calibration.ood_scores.tolist() == sorted(scores)
    is_ood = torch.tensor([decision == "abstain_ood" for decision in after.decision])
    assert int(is_ood.sum()) <= new.policy.alpha * (len(scores) + 1)
    assert "205 logged images, 205 reviewed: 200 of a class, 5 none_of_the_classes" in sample.summary()
    assert "with 200 of them, 2.4 to 8.4%" in found.lines[1]  # quantiles of Beta(10, 191)
    assert "5 images labelled none_of_the_classes" in found.lines[2]
    manifest = new.save(tmp_path / "bundle")
    assert manifest.version != model.version and found.warnings == ()
    again = load_model(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    assert torch.equal(again.predict(images).ood_p_value, after.ood_p_value)
    twice = recalibrate_from_sample(again, sample, {}).model.report["provenance"]
    assert [entry["from"] for entry in twice[HISTORY]] == [model.version, manifest.version]
    assert twice[HISTORY][0]["labels"] == twice[HISTORY][0]["effective_sample_size"] == 200
    assert twice["train"] == model.report["provenance"]["train"]


def test_images_drawn_rarely_count_more(model: FittedModel, sample: Sample) -> None:
    rare = torch.arange(200) % 2 == 0
    uneven = replace(sample, weights=torch.where(rare, 20.0, 2.0).double())
    assert "200 of a class, which count as 110 drawn equally, 5 none" in uneven.summary()
    new = recalibrate_from_sample(model, uneven, {}).model
    assert len(new.calibration) == 110 == new.report["provenance"][HISTORY][-1]["effective_sample_size"]
    scores = new.compute(next(sample.of_class.batches(200)).images)["ood_score"]
    assert float(new.calibration.ood_scores.median()) == pytest.approx(float(scores[rare].median()), rel=0.2)


def test_refuses_rates_that_the_images_cannot_keep(model: FittedModel, sample: Sample) -> None:
    few = sample.at(torch.arange(30))
    with pytest.raises(UsageError, match=r"alpha ≥ .* with n = 30 .* at least 99 images"):
        recalibrate_from_sample(model, few, {"alpha": 0.01})
    with pytest.raises(UsageError, match=r"coverage ≤ .* with n = 30 .* at least 99 images"):
        recalibrate_from_sample(model, few, {"coverage": 0.99})
    with pytest.raises(UsageError, match="calibration of a classifier does not read max_width"):
        recalibrate_from_sample(model, few, {"max_width": 2.0})


def test_a_risk_that_cannot_be_shown(model: FittedModel, sample: Sample) -> None:
    """Of the dimmed digits nearly all are wrong; where the model is right, the risk of a fit takes thousands."""
    assert "NOTHING IS ACCEPTED" in recalibrate_from_sample(model, sample, {}).lines[0]
    predicted = model.decide(model.outputs(dataset_outputs(model, sample.of_class, "").packed.numpy())).class_index
    right = replace(sample, of_class=replace(sample.of_class, labels=torch.from_numpy(predicted)))
    asked = model.report | {"metrics": {**model.report["metrics"], "risk_asked": 0.001}}
    found = recalibrate_from_sample(replace(model, report=asked), right, {})
    assert found.model.policy.risk == 0.05 and found.lines[0].startswith("of the accepted images at most 5 %")
    with pytest.raises(UsageError, match=r"risk of 0\.001 cannot be shown"):
        recalibrate_from_sample(model, right, {"risk": 0.001})


@pytest.fixture(scope="module")
def base(tiny_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> FittedModel:
    """The network's own predictions."""
    bundle = tmp_path_factory.mktemp("original") / "bundle"
    assert fit([*tiny_job.args, "--predictions", "original", "--no-report", "--out", str(bundle)]) == 0
    return load_model(bundle, device="cpu", allow_factories=[FACTORY])


def test_base_predictions_get_another_temperature_from_images_that_do_not_calibrate(
    base: FittedModel, sample: Sample
) -> None:
    head = base.pipeline.scorer.head
    assert isinstance(head, TemperatureHead)
    sharp = TemperatureHead(
        {"temperature": head.temperature / 20}, record={"temperature": float(head.temperature) / 20}
    )
    pipeline = type(base.pipeline)(
        base.pipeline.scorer.replace(head=sharp), base.pipeline.calibration_scores, base.pipeline.checks
    )
    found = recalibrate_from_sample(replace(base, pipeline=pipeline), sample, {})
    fitted = found.model.pipeline.scorer.head
    assert float(fitted.temperature) > 5 * float(sharp.temperature)
    assert fitted.record["temperature"] == pytest.approx(float(fitted.temperature))
    assert len(found.model.calibration) == 150 and "by 50 images, which do not calibrate" in found.lines[1]


@pytest.mark.parametrize("rare", [60, 2])
def test_a_temperature_stays_where_few_images_that_count_equally_choose_it(
    base: FittedModel, sample: Sample, rare: int
) -> None:
    few = sample.at(torch.arange(60)) if rare == 60 else sample
    weights = torch.where(torch.arange(len(few.of_class)) < rare, 50.0, 1.0).double()
    new = recalibrate_from_sample(base, replace(few, weights=weights), {"alpha": 0.3, "coverage": 0.7}).model
    assert new.pipeline.scorer.head is base.pipeline.scorer.head
    assert new.report["provenance"][HISTORY][-1]["calibrated_on"] == len(few.of_class)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_images_are_refused(base: FittedModel, sample: Sample, digits: ImageDataset, count: int) -> None:
    few = sample.at(torch.arange(count))
    with pytest.raises(UsageError, match=rf"with n = {count}"):
        recalibrate_from_sample(base, few, {})
    with pytest.raises(UsageError, match=r"a quarter of the sampled images .* at least 100 drawn equally"):
        recalibrate_from_sample(base, few, {}, digits.subset(torch.arange(3)))


def test_intervals_of_a_regression(angle_bundle: Path, data_root: Path, tmp_path: Path) -> None:
    model = load_model(angle_bundle, device="cpu", allow_factories=[FACTORY])
    data = open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    assert data.values is not None
    images = [Logged(dimmed(data, i), "label", repr(float(data.values[i]))) for i in range(60)]
    sample = read_sample(write_log(tmp_path, images), model)
    new = recalibrate_from_sample(model, sample, {}).model
    found = new.predict(next(sample.of_class.batches(60)).images)
    low, high = found.interval.double().unbind(1)
    values = sample.of_class.values
    assert values is not None
    inside = (values >= low - 1e-3) & (values <= high + 1e-3)
    assert int(inside.sum()) >= 55  # ⌈61 · 0.9⌉
