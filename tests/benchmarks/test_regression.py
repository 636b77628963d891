"""The networks and the methods of the regression benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.regression.networks import gaussian_nll, trained
from benchmarks.regression.run import coverage_of_other_half, ensemble, mc_dropout, measured, normal, outputs_of
from psc_core import PRESETS, open_dataset
from psc_core.data.dataset import ImageDataset


@pytest.fixture(scope="module")
def digits(data_root: Path) -> ImageDataset:
    data = open_dataset(f"rotated-mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])
    return data.subset(torch.arange(200))


def test_outputs_are_in_the_targets_unit(digits: ImageDataset, tmp_path: Path) -> None:
    net = trained(digits, tmp_path / "net.safetensors", epochs=3, seed=0, outputs=2)
    outputs, y = outputs_of(net, digits), digits.values
    assert y is not None
    expected = torch.nn.GaussianNLLLoss()(outputs[:, 0], y, outputs[:, 1].exp())
    torch.testing.assert_close(gaussian_nll(outputs, y), expected)
    error, spread = (outputs[:, 0] - y).square().mean().sqrt(), y.std()
    assert float(error) < float(spread) and float(outputs[:, 1].exp().mean().sqrt()) > 0.2 * float(error)
    again = trained(digits, tmp_path / "net.safetensors", epochs=3, seed=5, outputs=2)
    forecast = ensemble([net, again])(digits)
    torch.testing.assert_close(forecast.mean, outputs[:, 0])
    torch.testing.assert_close(forecast.deviation, (outputs[:, 1] / 2).exp())
    assert float(forecast.strangeness.abs().max()) == 0.0


def test_dropout_disagrees_and_a_normal_interval_covers(digits: ImageDataset, tmp_path: Path) -> None:
    net = trained(digits, tmp_path / "drop.safetensors", epochs=1, seed=0, dropout=0.5)
    assert float(mc_dropout(net, digits)(digits).strangeness.min()) > 0 and not net.dropout.training
    values = digits.values
    assert values is not None
    found = measured(normal(values + 1.0, torch.ones_like(values), values), digits)
    assert found["rmse"] == pytest.approx(1.0) and found["coverage"] == 1.0
    assert found["width"] == pytest.approx(2 * 1.95996, rel=1e-4)


def test_one_half_of_the_test_images_calibrates_the_other(digits: ImageDataset) -> None:
    generator, count = torch.Generator().manual_seed(0), 20_000
    many = replace(digits, values=torch.randn(count, generator=generator, dtype=torch.float64))
    narrow = torch.full((count,), 0.25, dtype=torch.float64)  # The deviation is wrong, the ranks are not.
    forecast = normal(torch.zeros(count, dtype=torch.float64), narrow, narrow)
    assert abs(coverage_of_other_half(forecast, many, seed=1) - 0.95) < 4 * (2 * 0.95 * 0.05 / (count / 2)) ** 0.5
    assert measured(forecast, many)["coverage"] < 0.5
