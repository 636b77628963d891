"""R² after every layer of a small network, beside scikit-learn on whole matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn

from psc_core.collapse import CollapseReport, LinearFit, to_csv, to_text
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.settings import FitSettings
from psc_core.tasks.regression.fit.bins import binned
from tests.psc_core.collapse.support import measured

SETTINGS = FitSettings(device="cpu", batch_images=50)


@pytest.fixture(scope="module")
def turned(data_root: Path) -> tuple[ImageDataset, ImageDataset]:
    train, val = (
        open_dataset(f"rotated-mnist:{data_root}", split=split, preprocess=PRESETS["mnist"])
        for split in ("train", "val")
    )
    return binned(train.subset(torch.arange(300)), val)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, 1)
    ).eval()


def test_equals_ridge_on_whole_matrices(turned: tuple[ImageDataset, ImageDataset]) -> None:
    train, val = turned
    net = network()
    report = measured(net, train, val, replace(SETTINGS, granularity="all"))
    assert report.measure is LinearFit and train.values is not None and val.values is not None
    pixels = [train.preprocess.standardise(next(data.batches(len(data))).images) for data in turned]
    with torch.inference_mode():
        x, x_val = (net[:5](part).double() for part in pixels)
    best = max(
        Ridge(alpha=float(alpha)).fit(x, train.values).score(x_val, val.values) for alpha in torch.logspace(-6, 4, 40)
    )
    got = report.layer("4").quality
    assert best - 0.02 < got <= best + 1e-6
    chosen = report.candidate()
    assert LinearFit.name in chosen.reason and LinearFit.name in to_text(report, chosen) and ",r2" in to_csv(report)
    assert CollapseReport.from_json(report.to_json()) == report
    assert min(layer.quality_error for layer in report.layers if layer.quality_error is not None) == 0.0


def test_small_budgets_make_more_groups(turned: tuple[ImageDataset, ImageDataset]) -> None:
    train, val = turned
    whole, few = (
        measured(network(), train, val, replace(SETTINGS, max_memory=budget)) for budget in (1 << 30, 1 << 14)
    )
    for one, other in zip(whole.layers, few.layers, strict=True):
        assert one.quality == pytest.approx(other.quality, abs=1e-9)
