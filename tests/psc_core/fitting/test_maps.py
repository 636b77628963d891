"""Maps of a fitted model: which layer, that it finds what is patched, and that what is served is what was fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psc_core import PSC, FitSettings, fit_psc
from psc_core.checks import CROP, PATCHES, TEXTURE, paste, regret
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.errors import UsageError
from psc_core.fit_parts import MapChoice, choose_map
from psc_core.maps import Grid, PositionMoments
from psc_core.metrics import auroc
from psc_core.projection import FittedProjection

FACTORY = "tests.tiny:network"
SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="module")
def psc(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> PSC:
    return fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=SETTINGS)


def test_what_is_patched_is_found(psc: PSC, val: ImageDataset) -> None:
    images = next(split_validation(val, SETTINGS.seed)[1].batches(200)).images
    patched, mask = paste(images, TEXTURE, torch.Generator().manual_seed(1))
    maps = psc.predict(patched, maps=True).maps
    assert maps is not None and maps.dtype == torch.uint8
    rows, columns = maps.shape[1:]
    there = nn.functional.interpolate(mask[:, None].float(), (rows, columns), mode="area")[:, 0] > 0.5
    assert auroc(maps[~there].double(), maps[there].double()) > 0.7
    usual = psc.predict(images, maps=True).maps
    assert usual is not None and float((usual >= 128).float().mean()) < 0.03


def test_what_is_served_was_fitted(psc: PSC, val: ImageDataset, tmp_path: Path) -> None:
    layer_map, report = psc.pipeline.map, psc.report["metrics"]["map"]
    assert layer_map is not None and layer_map.layer == report["chosen"] and report["kinds"] == list(PATCHES)
    assert layer_map.layer in psc.backbone.layers
    psc.save(tmp_path / "bundle")
    served = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    images = next(val.batches(8)).images
    fitted, told = psc.predict(images, maps=True), served(images, maps=True)
    assert fitted.maps is not None and told.maps is not None and torch.equal(fitted.maps, told.maps)
    assert torch.equal(told.outputs.packed, served.predict(images).outputs.packed)
    some = told[torch.tensor([3, 1])]
    assert some.maps is not None and torch.equal(some.maps, told.maps[[3, 1]])
    assert served.predict(images).maps is None
    none = served.predict(images[:0], maps=True).maps
    assert none is not None and none.shape == (0, *told.maps.shape[1:])
    again = served.calibrate(val).pipeline.map
    assert again is not None and torch.equal(again.density.thresholds, layer_map.density.thresholds)


def test_a_model_without_checks_has_no_map(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    settings = SETTINGS.changed({"ood_score": "density"})
    psc = fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=settings)
    assert psc.pipeline.map is None and "map" not in psc.report["metrics"]
    with pytest.raises(UsageError, match="has no map; fit it again with checks"):
        psc.predict(next(val.batches(2)).images, maps=True)


def test_the_least_regret_is_chosen() -> None:
    choice = MapChoice({"a": {CROP: 0.9, TEXTURE: 0.5}, "b": {CROP: 0.8, TEXTURE: 0.8}, "c": {CROP: 0.5, TEXTURE: 0.9}})
    assert choice.chosen == "b" and regret(choice.aurocs, "b") == pytest.approx(0.1)
    assert choice.to_json()["layers"][1] == {"layer": "b", "auroc": [0.8, 0.8]}


def test_layers_whose_positions_are_alike_have_no_map(val: ImageDataset) -> None:
    sums = PositionMoments(1, Grid(4, 4))
    sums.add(torch.ones(3, 1, 16))
    compute = SETTINGS.compute()
    assert choose_map(lambda images: {"a": torch.ones(len(images), 1, 16)}, {"a": sums}, val, compute, 0) is None
    assert choose_map(lambda images: {}, {}, val, compute, 0) is None
