"""What is collected for a report comes from the path that serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core import PRESETS, open_dataset
from psc_core.data.dataset import labelled, split_validation
from psc_core.data.sources import ArraySource
from psc_core.evaluation.evaluate import score_images
from psc_core.evaluation.values import score_numbers
from psc_core.images.preprocess import Preprocess
from psc_core.metrics import regression
from psc_core.model.predictor import PSC
from psc_core.model.regressor import PSCRegressor
from psc_core.report import collect
from psc_core.report.content import Content, Role, ValueSet
from tests.conftest import TinyJob


def test_a_fit_keeps_what_it_served(tiny_bundle: Path, data_root: Path) -> None:
    kept = Content.load(tiny_bundle)
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    assert kept.version == psc.version
    roles = {images.name: images.role for images in kept.sets}
    assert roles["training"] is Role.TRAINING and roles["validation"] is Role.VALIDATION
    assert {name for name, role in roles.items() if role is Role.MADE_UP} >= {"turned", "binary", "framed"}
    val = open_dataset(f"dirty-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    _, calibration_split = split_validation(val, 0)
    validation = next(images for images in kept.sets if images.name == "validation")
    prediction = psc.predict(torch.cat([batch.images for batch in calibration_split.batches(64)]))
    assert torch.allclose(validation.ood_score, torch.as_tensor(prediction.ood_score).float(), atol=1e-4)
    assert validation.predicted.tolist() == prediction.probabilities.argmax(1).tolist()
    assert set(validation.quality) == {"psc", "base"}
    assert set(validation.groups) == {"mnist", "ambiguous-mnist"}
    assert kept.sizes["nc4"].ndim == 2


def test_a_fit_keeps_the_numbers_that_it_served(angle_job: TinyJob, angle_bundle: Path, data_root: Path) -> None:
    kept = Content.load(angle_bundle)
    assert {images.role for images in kept.sets} == {Role.TRAINING, Role.VALIDATION, Role.MADE_UP}
    assert kept.pictures == () and all(isinstance(images, ValueSet) for images in kept.sets)
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    val = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    _, calibration_split = split_validation(val, 0)
    images = torch.cat([batch.images for batch in calibration_split.batches(64)])
    prediction, values = model.predict(images), calibration_split.values
    validation = next(each for each in kept.sets if each.name == "validation")
    assert isinstance(validation, ValueSet) and values is not None
    assert torch.equal(validation.values, values)
    assert torch.allclose(validation.mean, prediction.mean, atol=1e-3)
    assert torch.allclose(validation.deviation, torch.hypot(prediction.aleatoric, prediction.epistemic), rtol=1e-4)
    assert torch.allclose(validation.ood_score, prediction.ood_score, atol=1e-4)
    with torch.no_grad():
        own = angle_job.net(val.preprocess.standardise(images))[:, 0]
    assert validation.quality["base"] == {"rmse": pytest.approx(regression.rmse(own, values), rel=1e-4)}
    assert validation.quality["psc"]["crps"] == pytest.approx(model.report["metrics"]["crps"], rel=1e-4)
    (turned,) = (each for each in kept.sets if each.name == "turned")
    assert isinstance(turned, ValueSet) and len(turned.mean) == 75 and len(turned.values) == 0 == len(turned.quality)


def test_numbers_of_out_of_distribution_images_are_no_truth(angle_bundle: Path, data_root: Path) -> None:
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    data = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=model.preprocess)
    scored = score_numbers(model, data)
    assert len(collect.value_set("test", Role.TEST, scored, data).values) == len(data)
    outside = collect.value_set("others", Role.OOD, scored, data)
    assert len(outside.values) == 0 and outside.quality == {}


def test_pictures_are_the_extremes_of_each_class(shipped_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    data = open_dataset(f"mnist:{data_root}", split="test", preprocess=psc.preprocess).subset(torch.arange(60))
    scored = score_images(psc, data)
    pictures = collect.pictures_of(data, scored)
    for label in range(10):
        mine = sorted(scored.ood["psc"][data.first_labels() == label].tolist())
        shown = {
            why: [each.ood_score for each in pictures if (each.label, each.why) == (label, why)]
            for why in ("most unusual", "most typical")
        }
        assert shown["most typical"] == pytest.approx(mine[: collect.EACH])
        assert shown["most unusual"] == pytest.approx(mine[::-1][: collect.EACH])
    assert all(torch.equal(each.pixels, torch.from_numpy(data.image(i))) for each in pictures[:1]
               for i in [scored.ood["psc"].tolist().index(each.ood_score)])  # fmt: skip


def test_large_images_are_shown_small() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 300, 200), dtype=np.uint8)
    preprocess = Preprocess("L", 300, 200, None, (0.5,), (0.5,))
    data = labelled("large", ("a", "b"), ArraySource(pixels), torch.tensor([0, 1]), preprocess)
    small = collect.thumbnail(data, 1)
    assert small.shape == (1, 96, 64) and small.dtype == torch.uint8
    assert abs(float(small.float().mean()) - pixels[1].mean()) < 2
