"""What a fit asks of a regression: the network's own error, and metrics of the calibration split."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from psc_core import PRESETS, FitSettings, open_dataset
from psc_core.tasks.regression.fit.task import calibration_metrics, network_rmse
from tests.conftest import TinyJob

COMPUTE = FitSettings(device="cpu").compute()


def test_own_error_is_the_rmse(angle_job: TinyJob, data_root: Path) -> None:
    turned = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    images = torch.cat([batch.images for batch in turned.batches(64)])
    with torch.no_grad():
        outputs = angle_job.net(turned.preprocess.standardise(images))[:, 0].tolist()
    assert turned.values is not None
    errors = [output - value for output, value in zip(outputs, turned.values.tolist(), strict=True)]
    found = network_rmse(angle_job.net, turned, COMPUTE)
    assert found == pytest.approx(math.sqrt(sum(error**2 for error in errors) / len(errors)), rel=1e-4)


def test_metrics_are_those_of_the_calibration_split() -> None:
    y, mean = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    metrics = calibration_metrics(mean, torch.ones(3), y)
    assert metrics["validation_images"] == 3 and metrics["rmse"] == pytest.approx((1 / 3) ** 0.5)
