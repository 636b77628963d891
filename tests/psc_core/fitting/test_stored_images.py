from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from psc_core import PSC, FitSettings, PSCRegressor, fit_psc, load_model, open_dataset
from psc_core.checks import TEXTURE, paste
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.images.preprocess import PRESETS
from psc_core.maps import Grid
from psc_core.metrics import auroc
from psc_core.model import FittedModel
from psc_core.projection import FittedProjection
from tests.conftest import TinyJob
from tests.opened import loaded

FACTORY = "tests.tiny:network"
COUNT = 25
SETTINGS = FitSettings(device="cpu", head="duq", stored_images=COUNT)
CHOSEN = ChosenLayer(("4",), "")


@pytest.fixture(scope="module")
def psc(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> PSC:
    return fit_psc(net, CHOSEN, projection, train, val, settings=SETTINGS)


def check_kept(model: FittedModel, train: ImageDataset) -> None:
    """Each kept image is shown as it is, and is its own nearest."""
    stored_images = model.pipeline.stored_images
    assert stored_images is not None and len(stored_images) == COUNT
    kept = stored_images.tensors()
    images = next(train.subset(kept["images"]).batches(COUNT)).images
    assert torch.equal(kept["pixels"], images)
    _, explanation = model.pipeline.explain(images)
    nearest, order = explanation["stored_distance"].sort(dim=1)
    assert order[:, 0].tolist() == list(range(COUNT))
    assert bool((nearest[:, 0] < 0.01).all()) and bool((nearest[:, 1] > 0.1).all())
    assert stored_images.ordinary == pytest.approx(float(nearest[:, 1].median()), rel=1e-3)


def test_kept_images_are_their_own_nearest(psc: PSC, train: ImageDataset) -> None:
    check_kept(psc, train)
    assert psc.pipeline.stored_images is not None
    labels = psc.pipeline.stored_images.tensors()["labels"]
    assert sorted(labels.bincount(minlength=10).tolist()) == [2] * 5 + [3] * 5
    assert torch.equal(labels, train.first_labels()[psc.pipeline.stored_images.tensors()["images"]])


def test_they_stay_wherever_the_model_goes(psc: PSC, train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    version = psc.save(tmp_path / "bundle").version
    served = loaded(tmp_path / "bundle")
    check_kept(served, train)
    check_kept(served.calibrate(val), train)
    assert served.save(tmp_path / "again").version == version


def test_nothing_else_changes(
    psc: PSC, net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    plain = fit_psc(net, CHOSEN, projection, train, val, settings=SETTINGS.changed({"stored_images": None}))
    assert plain.pipeline.stored_images is None
    images = next(val.batches(20)).images
    assert torch.equal(psc.predict(images).outputs.packed, plain.predict(images).outputs.packed)
    explained, without = psc.pipeline.explain(images)[1], plain.pipeline.explain(images)[1]
    assert explained.keys() - without.keys() == {"stored_distance"}


def test_a_regression_keeps_their_numbers(angle_job: TinyJob, data_root: Path, tmp_path: Path) -> None:
    opened = partial(open_dataset, f"rotated-mnist:{data_root}", preprocess=PRESETS["mnist"])
    train, val = opened(split="train"), opened(split="val")
    quick = {"layer": "4", "c_proj": 4, "d_proj": 2, "coverage": 0.9, "stored_images": COUNT}
    model = PSCRegressor.fit(angle_job.net, train, val, **quick)
    check_kept(model, train)
    model.save(tmp_path / "bundle")
    stored_images = loaded(tmp_path / "bundle").pipeline.stored_images
    assert stored_images is not None and train.values is not None
    kept = stored_images.tensors()
    assert torch.equal(kept["values"], train.values[kept["images"]])
    document, *_ = stored_images.documents(torch.arange(COUNT).sub(3).abs().numpy(), model.classes)
    assert document["value"] == float(kept["values"][3]) and document["label"] in model.classes


@pytest.mark.filterwarnings("ignore:expected the mean")
def test_they_are_named_by_where_they_stood(angle_job: TinyJob, data_root: Path) -> None:
    opened = partial(open_dataset, f"rotated-mnist:{data_root}", preprocess=PRESETS["mnist"])
    whole, val = opened(split="train"), opened(split="val")
    train = whole.subset(torch.arange(100, len(whole)))
    quick = {"layer": "4", "c_proj": 4, "d_proj": 2, "coverage": 0.9, "stored_images": COUNT}
    model = PSCRegressor.fit(angle_job.net, train, val, head="dve", max_images=200, **quick)
    check_kept(model, train)
    kept = dict(model.pipeline.scorer.head.named_buffers())
    assert train.values is not None and len(kept["images"]) == 200
    numbers = kept["value_center"] + kept["value_scale"] * kept["values"]
    torch.testing.assert_close(numbers.double(), train.values[kept["images"].long()], atol=1e-3, rtol=1e-5)


WITH_MAPS = FitSettings(device="cpu", head="duq", stored_images=20)


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
        return model.pipeline.explain(images)[1]["stored_distance"].argmin(dim=1)


def kept_of(model: PSC, train: ImageDataset) -> Tensor:
    assert model.pipeline.stored_images is not None
    return next(train.subset(model.pipeline.stored_images.tensors()["images"]).batches(20)).images


def test_in_bfloat16(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection, tmp_path: Path
) -> None:
    chosen, images = ChosenLayer(("4",), ""), next(val.batches(150)).images
    exact = fit_psc(net, chosen, projection, train, val, settings=WITH_MAPS)
    half = fit_psc(net, chosen, projection, train, val, settings=WITH_MAPS.changed({"precision": "bf16"}))
    half.save(tmp_path / "bundle")
    served = loaded(tmp_path / "bundle")
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
