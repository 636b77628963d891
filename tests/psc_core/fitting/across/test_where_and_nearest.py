"""Maps and nearest kept images of other networks than a float32 one with a name: bfloat16, ONNX, tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from psc_core import PSC, FitSettings, fit_psc, load_model
from psc_core.checks import TEXTURE, paste
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.maps import Grid
from psc_core.metrics import auroc
from psc_core.projection import FittedProjection

FACTORY = "tests.tiny:network"
SETTINGS = FitSettings(device="cpu", head="duq", stored_images=20)


def told(model: PSC, images: Tensor) -> float:
    """AUROC of the grey levels of positions that a texture was patched over."""
    patched, mask = paste(images, TEXTURE, torch.Generator().manual_seed(1))
    maps = model.predict(patched, maps=True).maps
    assert maps is not None and len(maps) == len(images)
    there = nn.functional.interpolate(mask[:, None].float(), maps.shape[1:], mode="area")[:, 0] > 0.5
    return auroc(maps[~there].double(), maps[there].double())


def nearest(model: PSC, images: Tensor) -> Tensor:
    """The nearest kept image of each."""
    with torch.inference_mode():
        return model.pipeline.explain(images)[1]["nearest_kept"][:, 0]


def kept_of(model: PSC, train: ImageDataset) -> Tensor:
    assert model.pipeline.stored_images is not None
    return next(train.subset(model.pipeline.stored_images.tensors()["images"]).batches(20)).images


def test_in_bfloat16(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection, tmp_path: Path
) -> None:
    chosen, images = ChosenLayer(("4",), ""), next(val.batches(150)).images
    exact = fit_psc(net, chosen, projection, train, val, settings=SETTINGS)
    half = fit_psc(net, chosen, projection, train, val, settings=SETTINGS.changed({"precision": "bf16"}))
    half.save(tmp_path / "bundle")
    served = load_model(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    assert served.pipeline.scorer.precision == "bf16"
    assert told(served, images) == pytest.approx(told(exact, images), abs=0.02)
    assert nearest(served, kept_of(half, train)).tolist() == list(range(20))


def test_of_an_onnx_graph(train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
    ).eval()  # fmt: skip
    model = PSC.fit(net, train, val, head="duq", stored_images=20)
    model.save(tmp_path / "bundle", graph=True)
    served, images = load_model(tmp_path / "bundle", device="cpu"), next(val.batches(100)).images
    assert (tmp_path / "bundle" / "backbone.onnx").exists()
    ours, theirs = model.predict(images, maps=True).maps, served.predict(images, maps=True).maps
    assert ours is not None and theirs is not None
    assert float((ours.int() - theirs.int()).abs().max()) <= 1
    assert nearest(served, kept_of(model, train)).tolist() == list(range(20))


def test_of_tokens(train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"image_size": 28, "patch_size": 4, "hidden_dim": 16, "mlp_dim": 32, "num_heads": 2, "num_layers": 4}
    net = nn.Sequential(nn.Conv2d(1, 3, 1), VisionTransformer(**size, num_classes=10)).eval()
    model = PSC.fit(net, train, val, head="duq", stored_images=20)
    assert model.pipeline.map is not None
    assert model.pipeline.map.grid == Grid(7, 7, first=1)  # Behind the token of the class.
    assert told(model, next(val.batches(150)).images) > 0.6
    assert nearest(model, kept_of(model, train)).tolist() == list(range(20))
