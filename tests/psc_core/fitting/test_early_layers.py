"""Checks of a fitted model: which there are, on which layers, and that what is served is what was fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from psc_core import PSC, FitSettings, fit_psc, open_dataset
from psc_core.calibrate import score_dataset
from psc_core.checks import check_values
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.fit_parts import early_layers
from psc_core.images.preprocess import PRESETS
from psc_core.projection import FittedProjection

FACTORY = "tests.tiny:network"
SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="module")
def psc(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> PSC:
    return fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=SETTINGS)


def test_what_is_served_was_fitted(psc: PSC, val: ImageDataset, tmp_path: Path) -> None:
    assert psc.checks == ("texture", "content", "confidence")
    assert psc.layers == ("4",) and psc.backbone.layers[1:] == (psc.report["metrics"]["checks"]["chosen"][8],)
    psc.save(tmp_path / "bundle")
    served = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    calibrates = split_validation(val, SETTINGS.seed)[1]
    images = next(calibrates.batches(len(calibrates))).images
    fitted, told = psc.predict(images), served.predict(images)
    assert torch.equal(told.outputs.packed, fitted.outputs.packed)
    torch.testing.assert_close(told.ood_score.sort().values, psc.calibration.ood_scores)
    assert set(told.checks) == set(psc.checks)
    n = len(images)  # of n calibration images themselves, the k-th strangest has the p-value (k + 1) / (n + 1)
    for p_value in (told.ood_p_value, *told.checks.values()):
        assert (p_value >= 2 / (n + 1) - 1e-6).all() and p_value.max() == pytest.approx(1)


def test_score_is_that_of_the_checks(psc: PSC, val: ImageDataset) -> None:
    selection, calibrates = split_validation(val, SETTINGS.seed)
    checks = psc.pipeline.checks
    assert checks is not None
    values = [
        check_values(checks.names, score_dataset(psc.pipeline.scorer, half, SETTINGS.compute(), "").scores)
        for half in (selection, calibrates)
    ]
    torch.testing.assert_close(checks.ascending, values[0].sort(dim=0).values.T)
    torch.testing.assert_close(checks.calibration, values[1].sort(dim=0).values.T)
    torch.testing.assert_close(psc.calibration.ood_scores, checks.score(values[1]).sort().values)


def test_unlike_images_alarm_and_name_a_check(psc: PSC, data_root: Path) -> None:
    garments = next(open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"]).batches(64))
    prediction = psc.predict(garments.images)
    assert prediction.is_ood.float().mean() > 0.5
    smallest = torch.stack(list(prediction.checks.values())).amin(dim=0)
    assert (smallest[prediction.is_ood] <= psc.policy.alpha).float().mean() > 0.9


def test_ambiguous_images_are_no_alarm(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    both = torch.stack([train.labels, (train.labels + 1) % 10], dim=1).flatten()
    doubtful = replace(train, labels=both, offsets=2 * train.offsets)
    assert doubtful.is_ambiguous and not train.is_ambiguous
    psc = fit_psc(net, ChosenLayer(("4",), ""), projection, doubtful, val, head="duq", settings=SETTINGS)
    assert psc.checks == ("texture", "content")
    report = psc.report["metrics"]["checks"]
    assert "mixed" not in report["kinds"] and "several labels" in report["reason"]


def test_first_layer_leaves_no_texture(net: nn.Module, train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    from psc_core import fit_projection

    chosen = ChosenLayer(("0",), "")
    fitted = fit_projection(net, chosen, train, val, settings=SETTINGS)
    psc = fit_psc(net, chosen, fitted, train, val, head="duq", settings=SETTINGS)
    assert psc.checks == ("content", "confidence") and psc.backbone.layers == ("0",)
    psc.save(tmp_path / "bundle")
    assert PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY]).checks == psc.checks


def test_early_layers_lie_before_the_candidate() -> None:
    resnet = models.resnet18(num_classes=3).eval()
    image = torch.zeros(1, 3, 32, 32)
    assert early_layers(resnet, ["avgpool"], image) == ["layer2.0", "layer2.1", "layer3.0"]
    assert early_layers(resnet, ["layer2.1.conv2", "layer3.0.conv1"], image) == ["layer1.0", "layer1.1"]
    assert early_layers(resnet, ["conv1"], image) == []
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 3)
    )
    assert early_layers(plain, ["5:input"], image) == ["0", "2"]
    assert early_layers(plain, ["2"], image) == ["0"]
