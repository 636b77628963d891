"""What is checked before anything is fitted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import PRESETS, FitOptions, fit_psc, measure_collapse, open_dataset
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset
from psc_core.errors import DataError, FitError, UsageError
from psc_core.fitting.checks import own_accuracy, own_error
from psc_core.fitting.parts import FittedProjection
from tests.conftest import TinyJob

OPTIONS = FitOptions(device="cpu")


def test_rejects_unattainable_rates(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate("4")
    for rates, message in (({"alpha": 1e-4}, "alpha"), ({"coverage": 0.9999}, "coverage")):
        with pytest.raises(UsageError, match=message):
            fit_psc(net, candidate, projection, train, val, head="duq", options=OPTIONS, **rates)
    with pytest.raises(FitError, match="pca"):
        fit_psc(net, candidate, projection, train, val, pca=999, options=OPTIONS)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"predictions": "both"}, "predictions to be one of psc, base"),
        ({"head": "mlp"}, "head to be one of laplace"),
        ({"density": "kde"}, "density to be one of gda"),
        ({"ood_score": "entropy"}, "ood_score to be one of gates, density, got 'entropy'"),
        ({"risk": 1.0}, "risk between 0 and 1"),
    ],
)
def test_rejects_invalid_options_before_any_image_is_read(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
    option: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("psc_core.fitting.stages.cut", None)
    with pytest.raises(UsageError, match=message):
        fit_psc(net, Candidate(("4",), ""), projection, train, val, options=OPTIONS, **option)


def test_rejects_other_classes_or_fewer_than_two(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    with pytest.raises(DataError, match="the same class folders"):
        measure_collapse(net, train, replace(val, classes=(*val.classes[:-1], "x")), options=OPTIONS)
    alone = [replace(data, classes=("all",), labels=torch.zeros_like(data.labels)) for data in (train, val)]
    with pytest.raises(DataError, match="at least two classes"):
        measure_collapse(net, *alone, options=OPTIONS)


@pytest.mark.parametrize("count", [0, 1])
def test_rejects_classes_of_fewer_than_two_images(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, count: int
) -> None:
    labels = train.labels.clone()
    labels[labels == 3] = 4
    labels[:count] = 3
    with pytest.raises(DataError, match=f"two training images of each class, got {count} of '3'"):
        measure_collapse(net, replace(train, labels=labels), val, options=OPTIONS)


def test_base_predictions_need_one_output_per_class(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    wide = torch.nn.Sequential(*list(net)[:-1], torch.nn.Linear(16, 20)).eval()  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"expected a network of 10 outputs, .* got 20"):
        fit_psc(wide, Candidate(("4",), ""), projection, train, val, predictions="base", options=OPTIONS)


def test_own_accuracy_counts_the_fraction_of_labels_that_is_predicted(train: ImageDataset) -> None:
    data = replace(train, labels=train.labels.repeat_interleave(2), offsets=2 * train.offsets)
    k = len(data.classes)
    data.labels[::6] = (data.labels[::6] + 1) % k
    images = torch.cat([batch.images for batch in data.batches(256)])
    lookup = {image.numpy().tobytes(): i for i, image in enumerate(images)}
    answers = torch.randint(0, k, (len(data),), generator=torch.Generator().manual_seed(0))
    answers[: len(data) // 2] = data.labels[::2][: len(data) // 2]

    class Remembers(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pixels = ((x - shift) / scale).round().to(torch.uint8)
            return torch.nn.functional.one_hot(answers[[lookup[each.numpy().tobytes()] for each in pixels]], k).float()

    scale, shift = data.preprocess.scale_and_shift()
    pairs = data.labels.view(-1, 2)
    expected = float((pairs == answers[:, None]).double().mean())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psc_core.fitting.checks.OWN_IMAGES", len(data))
        assert own_accuracy(Remembers(), data, OPTIONS.compute(), seed=0) == pytest.approx(expected)
        more = torch.nn.Sequential(Remembers(), torch.nn.Linear(k, k + 1))
        assert own_accuracy(more, data, OPTIONS.compute(), seed=0) is None


def test_own_error_is_that_of_as_many_images(angle_job: TinyJob, data_root: Path) -> None:
    turned = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    images = torch.cat([batch.images for batch in turned.batches(64)])
    with torch.no_grad():
        outputs = angle_job.net(turned.preprocess.standardise(images))[:, 0].tolist()
    assert turned.values is not None
    errors = [output - value for output, value in zip(outputs, turned.values.tolist(), strict=True)]
    found = [own_error(angle_job.net, turned, OPTIONS.compute(), 0, count) for count in (len(turned), 1)]
    assert found[0] == pytest.approx(math.sqrt(sum(error**2 for error in errors) / len(errors)), rel=1e-4)
    assert min(abs(abs(error) - (found[1] or 0)) for error in errors) < 1e-3
