"""What a fit asks of a regression: the network's own error, and metrics of the calibration split."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import PRESETS, FitSettings, open_dataset
from psc_core.tasks.regression import calibration_metrics, network_rmse, width_without_image
from tests.conftest import TinyJob

COMPUTE = FitSettings(device="cpu").compute()


def test_own_error_is_the_rmse(angle_job: TinyJob, data_root: Path) -> None:
    turned = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    images = torch.cat([batch.images for batch in turned.batches(64)])
    with torch.no_grad():
        outputs = angle_job.net(turned.preprocess.standardise(images))[:, 0].tolist()
    assert turned.values is not None
    errors = [output - value for output, value in zip(outputs, turned.values.tolist(), strict=True)]
    found, predicted = network_rmse(angle_job.net, turned, COMPUTE)
    assert predicted.tolist() == pytest.approx(outputs, abs=1e-4)
    assert found == pytest.approx(math.sqrt(sum(error**2 for error in errors) / len(errors)), rel=1e-4)


def test_metrics_are_those_of_the_calibration_split() -> None:
    y, mean = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    metrics = calibration_metrics(mean, torch.ones(3), y)
    assert metrics["validation_images"] == 3 and metrics["rmse"] == pytest.approx((1 / 3) ** 0.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_default_width_is_that_of_an_interval_that_looks_at_no_image(values: list[float], coverage: float) -> None:
    lower, upper = np.quantile(values, [(1 - coverage) / 2, (1 + coverage) / 2])
    width = width_without_image(torch.tensor(values, dtype=torch.float64), coverage)
    assert width == pytest.approx(upper - lower, rel=1e-9, abs=1e-9) and width > 0
