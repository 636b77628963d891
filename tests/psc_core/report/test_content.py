"""What a report keeps is what was served, and comes back as it was or with one clear error."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from psc_core import FitSettings, metrics
from psc_core.bundle import CONTENT, read_bundle
from psc_core.data.dataset import split_validation
from psc_core.errors import BundleError
from psc_core.fit import fit_stages
from psc_core.fit_data import FitJob
from psc_core.model import PSC, PSCRegressor
from psc_core.report import content as report_content
from psc_core.report.content import Content, Role, facts_of
from psc_core.report.tasks import ClassificationSet, RegressionSet
from psc_core.tasks import TASKS
from tests.conftest import TinyJob
from tests.opened import opened
from tests.psc_core.report.support import content, image_set, value_content


@pytest.mark.parametrize("task", TASKS)
def test_comes_back_as_it_was(tmp_path: Path, task: str) -> None:
    kept = content() if task == "classification" else value_content()
    groups = {"near": torch.tensor([0, 2]), "far": torch.tensor([1])}
    pictures = (*kept.pictures, *(replace(each, why="most unusual") for each in kept.pictures))
    kept = replace(kept, pictures=pictures, sets=(*kept.sets[:2], replace(kept.sets[2], groups=groups)))
    kept.save(tmp_path)
    back = Content.load(tmp_path, TASKS[task])
    assert back.version == kept.version
    assert plain(back.sizes) == plain(kept.sizes)
    for got, expected in zip((*back.sets, *back.pictures), (*kept.sets, *kept.pictures), strict=True):
        assert type(got) is type(expected) and plain(vars(got)) == plain(vars(expected))


def plain(value: Any) -> Any:
    """Tensors as lists, in mappings too."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_a_test_comes_behind_its_fit() -> None:
    fitted, tested = content(), replace(content(), sets=content().sets[1:], pictures=())
    both = fitted.extended_by(tested)
    assert [images.name for images in both.sets] == ["validation", "turned", "clothes", "turned", "clothes"]
    assert both.pictures == fitted.pictures and both.sizes == fitted.sizes
    others = (replace(fitted.pictures[0], why="most unusual"),)
    assert fitted.extended_by(replace(tested, pictures=others)).pictures == others


@pytest.mark.parametrize("task", TASKS)
def test_a_file_that_is_missing_damaged_or_of_another_task(tmp_path: Path, task: str) -> None:
    with pytest.raises(BundleError, match="--no-report"):
        Content.load(tmp_path, TASKS[task])
    (value_content() if task == "classification" else content()).save(tmp_path)
    with pytest.raises(BundleError, match="is damaged"):
        Content.load(tmp_path, TASKS[task])
    (tmp_path / CONTENT).write_bytes(b"no tensors")
    with pytest.raises(BundleError, match="is damaged"):
        Content.load(tmp_path, TASKS[task])
    for metadata in ({}, {"report": "[]"}, {"report": '{"version": "v", "sets": [{"name": "a"}], "pictures": []}'}):
        save_file({"x": torch.zeros(1)}, tmp_path / CONTENT, metadata=metadata)
        with pytest.raises(BundleError, match="is damaged"):
            Content.load(tmp_path, TASKS[task])


def test_a_fit_keeps_what_it_served(tiny_bundle: Path) -> None:
    kept = Content.load(tiny_bundle, TASKS["classification"])
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    assert kept.version == psc.version
    roles = {images.name: images.role for images in kept.sets}
    assert roles["training"] is Role.TRAINING and roles["validation"] is Role.VALIDATION
    assert {name for name, role in roles.items() if role is Role.SYNTHETIC} >= {"turned", "binary", "framed"}
    val = opened("dirty-mnist", "val")
    _, calibration_split = split_validation(val, 0)
    validation = next(images for images in kept.sets if images.name == "validation")
    prediction = psc.predict(torch.cat([batch.images for batch in calibration_split.batches(64)]))
    assert torch.allclose(validation.ood_score, torch.as_tensor(prediction.ood_score).float(), atol=1e-4)
    assert validation.predicted.tolist() == prediction.probabilities.argmax(1).tolist()
    assert set(validation.quality) == {"psc", "original"}
    assert set(validation.groups) == {"mnist", "ambiguous-mnist"}
    assert kept.sizes["nc4"].ndim == 2


def test_rates_of_a_fit_are_those_of_images_as_they_come(tiny_job: TinyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Balanced over classes, seven of the twenty images would be of the five rare ones."""
    monkeypatch.setattr(report_content, "REPORTED_IMAGES", 20)
    train, val = (opened("mnist", split) for split in ("train", "val"))
    labels = val.first_labels()
    rare = [(labels == label).nonzero()[:4, 0] for label in range(5, 10)]
    val = val.subset(torch.cat([(labels < 5).nonzero()[:, 0], *rare]).sort().values)
    job = FitJob.of(train, val, FitSettings(device="cpu", layer="4", head="duq", ood_score="density"))
    kept = report_content.collect_fit(fit_stages(tiny_job.net, job), tiny_job.net, job.data, job.compute, "")
    (validation,) = (images for images in kept.sets if images.name == "validation")
    assert isinstance(validation, ClassificationSet) and len(job.data.calibration) > 40 and len(validation.labels) == 20
    assert int((validation.labels >= 5).sum()) <= 5
    assert {picture.label for picture in kept.pictures} == {*job.data.calibration.first_labels().tolist()}


def test_a_fit_keeps_the_numbers_that_it_served(angle_job: TinyJob, angle_bundle: Path) -> None:
    kept = Content.load(angle_bundle, TASKS["regression"])
    assert {images.role for images in kept.sets} == {Role.TRAINING, Role.VALIDATION, Role.SYNTHETIC}
    assert kept.pictures == () and all(isinstance(images, RegressionSet) for images in kept.sets)
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    val = opened("rotated-mnist", "val")
    _, calibration_split = split_validation(val, 0)
    images = torch.cat([batch.images for batch in calibration_split.batches(64)])
    prediction, values = model.predict(images), calibration_split.values
    validation = next(each for each in kept.sets if each.name == "validation")
    assert isinstance(validation, RegressionSet) and values is not None
    assert torch.equal(validation.values, values)
    assert torch.allclose(validation.mean, prediction.mean, atol=1e-3)
    assert torch.allclose(validation.deviation, torch.hypot(prediction.aleatoric, prediction.epistemic), rtol=1e-4)
    assert torch.allclose(validation.ood_score, prediction.ood_score, atol=1e-4)
    with torch.no_grad():
        own = angle_job.net(val.preprocess.standardise(images))[:, 0]
    assert validation.quality["original"] == {"rmse": pytest.approx(metrics.rmse(own, values), rel=1e-4)}
    assert validation.quality["psc"]["crps"] == pytest.approx(model.report["metrics"]["crps"], rel=1e-4)
    (turned,) = (each for each in kept.sets if each.name == "turned")
    assert (
        isinstance(turned, RegressionSet) and len(turned.mean) == 75 and len(turned.values) == 0 == len(turned.quality)
    )


def test_facts_of_the_shipped_bundle(shipped_bundle: Path) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    found = facts_of(read_bundle(shipped_bundle), content(version))
    threshold = PSC.load(shipped_bundle, device="cpu").calibration.ood_score_threshold(0.05)
    assert found.ood_threshold == threshold
    assert found.flagged == {
        (images.role, images.name): sum(score > threshold for score in images.ood_score.tolist())
        / len(images.ood_score)
        for images in found.content.sets
    }
    assert list(found.quality) == ["the original network", "with PSC"]
    text = found.to_text()
    assert f"{threshold:.4g} nats" in text and "less accurate" not in text
    assert "4000 of them, 4.3 to 5.7%" in text  # quantiles of Beta(200, 3801)
    assert found.chosen is not None and found.chosen.layers == tuple(read_bundle(shipped_bundle).manifest.layers)


def test_sets_of_one_name_keep_their_rates(shipped_bundle: Path) -> None:
    manifest = read_bundle(shipped_bundle).manifest
    scores = {Role.VALIDATION: [0.0, 0.0], Role.SYNTHETIC: [0.0, 99.0], Role.OOD: [99.0, 99.0]}
    images = tuple(image_set("turned", role, of) for role, of in scores.items())
    found = facts_of(read_bundle(shipped_bundle), Content(manifest.version, images))
    assert [found.flagged_as(role) for role in scores] == [{"turned": rate} for rate in (0.0, 0.5, 1.0)]


def test_shares_of_decisions(shipped_bundle: Path) -> None:
    manifest = read_bundle(shipped_bundle).manifest
    scores = [0.0, 0.1, 0.2, 0.3, 3.0, 99.0, 2.0]
    images = (image_set("validation", Role.VALIDATION, scores), image_set("turned", Role.SYNTHETIC, [0.0, 99.0]))
    found = facts_of(read_bundle(shipped_bundle), Content(manifest.version, images))
    unusual = [score > found.ood_threshold for score in scores]
    unclear = [
        not ood and score > manifest.policy.ambiguity_threshold for score, ood in zip(scores, unusual, strict=True)
    ]
    accepted = [number for number in range(7) if not unusual[number] and not unclear[number]]
    assert 0 < len(accepted) < 6 and any(unclear) and any(unusual)
    assert found.shares == {
        "accepted": pytest.approx(len(accepted) / 7),
        "unclear": pytest.approx(sum(unclear) / 7),
        "unusual": pytest.approx(sum(unusual) / 7),
        "wrong": pytest.approx(sum(number % 2 for number in accepted) / len(accepted)),  # every second one is right
        "found": 0.5,
    }


@pytest.mark.parametrize(("found", "is_blind"), [(0, True), (4, True), (5, False), (40, False)])
def test_a_model_that_finds_nothing_is_warned_of(shipped_bundle: Path, found: int, is_blind: bool) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    known = image_set("validation", Role.VALIDATION, [0.0, 0.1])
    made = image_set("turned", Role.SYNTHETIC, [99.0] * found + [0.0] * (40 - found))
    of_bundle = facts_of(read_bundle(shipped_bundle), Content(version, (known, made)))
    assert any("will miss unusual images" in text for text in of_bundle.warnings) == is_blind


def test_where_nothing_is_accepted_nothing_is_said_of_errors(shipped_bundle: Path) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    images = image_set("validation", Role.VALIDATION, [99.0, 98.0])
    found = facts_of(read_bundle(shipped_bundle), Content(version, (images,)))
    assert found.shares == {"accepted": 0.0, "unclear": 0.0, "unusual": 1.0}
    assert len(found.verdict) == 1 and "100 % unusual" in found.verdict[0]


def test_a_bundle_without_images_has_its_thresholds(shipped_bundle: Path) -> None:
    bundle = read_bundle(shipped_bundle)
    found = facts_of(bundle, Content(bundle.manifest.version))
    assert f"{found.ood_threshold:.4g} nats" in found.to_text() and found.measured is None


def test_content_of_another_bundle_is_refused(shipped_bundle: Path) -> None:
    with pytest.raises(BundleError, match="0123456789ab"):
        facts_of(read_bundle(shipped_bundle), content())
