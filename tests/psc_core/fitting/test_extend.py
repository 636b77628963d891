"""Densities of a bundle that labelled images extend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import calibrate as recalibrate
from psc_core.bundle import HISTORY
from psc_core.calibrate import (
    LARGEST_LOSS,
    TIMES,
    Extension,
    Sample,
    extended,
    read_outside,
    read_sample,
    recalibrate_from_sample,
    seen_examples,
)
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.errors import UsageError
from psc_core.images.preprocess import PRESETS
from psc_core.log.store import Log
from psc_core.model import FittedModel, load_model
from psc_core.pipeline import Pipeline
from psc_core.stored_images import StoredImages
from tests.logged import Logged, dimmed, write_log
from tests.second_reader import SecondReader

FACTORY = "tests.tiny:network"


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> FittedModel:
    return load_model(tiny_bundle, device="cpu", allow_factories=[FACTORY])


@pytest.fixture(scope="module")
def log(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Log:
    digits = open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    labels = digits.first_labels().tolist()
    images = [Logged(dimmed(digits, i), "label", str(labels[i]), sampled=i < 160) for i in range(260)]
    return write_log(tmp_path_factory.mktemp("log"), images)


@pytest.fixture(scope="module")
def sample(log: Log, model: FittedModel) -> Sample:
    return read_sample(log, model)


@pytest.fixture(scope="module")
def more(log: Log, model: FittedModel) -> ImageDataset:
    return read_outside(log, model)


def test_another_camera_is_no_longer_strange(
    model: FittedModel, sample: Sample, more: ImageDataset, tmp_path: Path
) -> None:
    assert len(more) == 100
    found = recalibrate_from_sample(model, sample, {"risk": 0.6}, more)
    assert (
        found.warnings == () and "each of the 100 images outside the random sample counts this many" in found.lines[1]
    )
    entry = found.model.report["provenance"][HISTORY][-1]
    assert entry["labels"] == 160 and entry["calibrated_on"] == 120 == len(found.model.calibration)
    comparison = entry["extension"]
    assert comparison["images"] == 100 and comparison["times"] in TIMES[1:]
    for before, after in zip(comparison["auroc_before"], comparison["auroc_after"], strict=True):
        assert after >= before - LARGEST_LOSS
    images = next(sample.of_class.batches(160)).images
    before, after = model.compute(images), found.model.compute(images)
    assert float((after["log_density"] - before["log_density"]).mean()) > 10
    assert torch.equal(before.probabilities, after.probabilities)
    calibrates = after["ood_score"][40:].sort().values
    torch.testing.assert_close(found.model.calibration.ood_scores, calibrates, rtol=1e-5, atol=1e-4)

    manifest = found.model.save(tmp_path / "bundle")
    again = load_model(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    assert torch.equal(again.compute(images).packed, after.packed)
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["provenance"][HISTORY][-1] == entry
    with torch.inference_mode():
        features, _ = again.pipeline.scorer.features(again.pipeline.scorer.standardise(images))
        embedding = again.pipeline.scorer.embedding(features, None)
    reader = SecondReader(tmp_path / "bundle")
    exact = reader.gaussians(reader.tensors("density"), manifest.density.kind, embedding.density_input.double().numpy())
    torch.testing.assert_close(after["log_density"].double(), torch.from_numpy(exact), rtol=1e-4, atol=0.01)
    examples = seen_examples(model)
    assert seen_examples(again) == examples + 100 * comparison["times"]
    assert manifest.checks is not None and manifest.checks.images == 40


def test_a_network_that_is_a_graph(model: FittedModel, sample: Sample, more: ImageDataset, tmp_path: Path) -> None:
    model.save(tmp_path / "graph", graph=True)
    graph = load_model(tmp_path / "graph", device="cpu")
    found = recalibrate_from_sample(graph, sample, {"risk": 0.6}, more).model
    found.save(tmp_path / "extended")
    again, images = load_model(tmp_path / "extended", device="cpu"), next(sample.of_class.batches(64)).images
    assert again.backbone.onnx is not None and (tmp_path / "extended" / "backbone.onnx").is_file()
    assert torch.equal(again.compute(images).packed, found.compute(images).packed)
    assert found.report["provenance"][HISTORY][-1]["extension"]["times"] > 0


def test_of_a_bundle_that_keeps_no_number_the_training_rows_count(model: FittedModel) -> None:
    rows = model.report["provenance"]["train"]["rows"]
    assert seen_examples(model) == rows == model.pipeline.scorer.density.record["examples"]
    scorer = model.pipeline.scorer
    record = {name: value for name, value in scorer.density.record.items() if name != "examples"}
    density = type(scorer.density)(scorer.density.state_dict(), record=record)
    old = replace(model, pipeline=model.pipeline.with_scorer(scorer.replace(density=density)))
    assert seen_examples(old) == rows
    with pytest.raises(UsageError, match="does not say how many examples its density has seen; fit the bundle again"):
        seen_examples(replace(old, report={}))


def test_stored_images_move_with_the_density(model: FittedModel, sample: Sample, more: ImageDataset) -> None:
    scorer, batch = model.pipeline.scorer, next(more.batches(100))
    with torch.inference_mode():
        embedding = scorer.embed(batch.images)
        kept = StoredImages(
            {
                "embedding": scorer.density.coordinates(embedding.density_input).float(),
                "pixels": batch.images,
                "images": torch.arange(100),
                "labels": batch.first_labels(),
            }
        )
        pipeline = Pipeline(scorer, model.pipeline.calibration_scores, model.pipeline.checks, None, kept)
        read = recalibrate._read(scorer, more, recalibrate.Compute(model.device))
        new = extended(pipeline, read, 1000, 10)
        assert new.stored_images is not None
        moved = new.scorer.density.coordinates(embedding.density_input).float()
    torch.testing.assert_close(new.stored_images.embedding, moved, rtol=1e-4, atol=1e-4)
    assert new.scorer.texture is not None and scorer.texture is not None
    assert not torch.equal(new.scorer.texture.centres, scorer.texture.centres)


def test_checks_alone_do_not_win(
    model: FittedModel, sample: Sample, more: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled images are another camera's, so checks fitted to them are better; the densities are the same here."""
    monkeypatch.setattr(recalibrate, "extended", lambda pipeline, *_: pipeline)
    found = recalibrate.extend(model, more, sample.of_class, recalibrate.Compute(model.device))
    assert [*found.aurocs.values()] == [found.aurocs[0]] * len(TIMES)
    assert found.times == 0 and found.pipeline is model.pipeline and "the density stays as it is" in found.warning()


def test_a_density_that_loses_stays(
    model: FittedModel, sample: Sample, more: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = {0: {"turned": 0.9, "binary": 0.5}, 1: {"turned": 0.87, "binary": 0.99}, 10: {"turned": 0.5, "binary": 1.0}}
    assert recalibrate._choose(worse) == 0
    assert recalibrate._choose({**worse, 1: {"turned": 0.89, "binary": 0.99}}) == 1
    assert recalibrate._choose({0: worse[0], 1: worse[0]}) == 0
    monkeypatch.setattr(recalibrate, "_choose", lambda _: 0)
    found = recalibrate_from_sample(model, sample, {"risk": 0.6}, more)
    assert found.warnings[0].startswith("the density stays as it is: with these 100 images it is no better")
    density = found.model.pipeline.scorer.density
    assert torch.equal(density.get_buffer("centres"), model.pipeline.scorer.density.get_buffer("centres"))
    assert found.model.report["provenance"][HISTORY][-1]["extension"]["times"] == 0
    assert len(found.model.calibration) == 120  # The others have chosen, if only that nothing changes.


def test_a_table_for_people(model: FittedModel) -> None:
    found = Extension(model.pipeline, 7, 10, {0: {"turned": 0.5}, 10: {"turned": 0.75}})
    assert found.table().splitlines()[1:] == ["times  turned", "0      0.5000", "10     0.7500  ◀ chosen"]


def test_refuses_too_few_images_and_regressions(
    model: FittedModel, sample: Sample, more: ImageDataset, angle_bundle: Path
) -> None:
    with pytest.raises(UsageError, match=r"at least 25, and of 80 labelled that are 20 .* at least 100 drawn equally"):
        recalibrate_from_sample(model, sample.at(torch.arange(80)), {}, more)
    angles = load_model(angle_bundle, device="cpu", allow_factories=[FACTORY])
    with pytest.raises(
        UsageError, match=r"regression's bundle does not keep where its bins part.*fit the bundle again"
    ):
        seen_examples(angles)
