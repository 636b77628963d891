"""Kept training images of a fitted model: which, that they are their own nearest, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from psc_core import PSC, FitSettings, PSCRegressor, fit_psc, load_model, open_dataset
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.images.preprocess import PRESETS
from psc_core.model import FittedModel
from psc_core.projection import FittedProjection
from tests import tiny
from tests.conftest import TinyJob
from tests.psc_core.fitting.support import counted

FACTORY = "tests.tiny:network"
COUNT = 25
SETTINGS = FitSettings(device="cpu", head="duq", stored_images=COUNT)
CANDIDATE = ChosenLayer(("4",), "")


@pytest.fixture(scope="module")
def psc(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> PSC:
    return fit_psc(net, CANDIDATE, projection, train, val, settings=SETTINGS)


def check_kept(model: FittedModel, train: ImageDataset) -> None:
    """Each kept image is shown as it is, and is its own nearest."""
    stored_images = model.pipeline.stored_images
    assert stored_images is not None and len(stored_images) == COUNT
    kept = stored_images.tensors()
    images = next(train.subset(kept["images"]).batches(COUNT)).images
    assert torch.equal(kept["pixels"], images)
    _, explanation = model.pipeline.explain(images)
    assert explanation["nearest_kept"][:, 0].tolist() == list(range(COUNT))
    distances = explanation["nearest_distance"]
    assert bool((distances[:, 0] < 0.01).all()) and bool((distances.diff(dim=1) >= 0).all())
    assert bool((distances[:, 1] > 0.1).all())


def test_kept_images_are_their_own_nearest(psc: PSC, train: ImageDataset) -> None:
    check_kept(psc, train)
    assert psc.pipeline.stored_images is not None
    labels = psc.pipeline.stored_images.tensors()["labels"]
    assert sorted(labels.bincount(minlength=10).tolist()) == [2] * 5 + [3] * 5
    assert torch.equal(labels, train.first_labels()[psc.pipeline.stored_images.tensors()["images"]])


def test_they_stay_wherever_the_model_goes(psc: PSC, train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    version = psc.save(tmp_path / "bundle").version
    served = load_model(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    check_kept(served, train)
    check_kept(served.calibrate(val), train)
    assert served.save(tmp_path / "again").version == version


def test_nothing_else_changes(
    psc: PSC, net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    plain = fit_psc(net, CANDIDATE, projection, train, val, settings=SETTINGS.changed({"stored_images": None}))
    assert plain.pipeline.stored_images is None
    images = next(val.batches(20)).images
    assert torch.equal(psc.predict(images).outputs.packed, plain.predict(images).outputs.packed)
    explained, without = psc.pipeline.explain(images)[1], plain.pipeline.explain(images)[1]
    assert explained.keys() - without.keys() == {"nearest_kept", "nearest_distance"}


def test_only_kept_images_are_read_again(data_root: Path, projection: FittedProjection) -> None:
    net = tiny.network().eval()
    (train, reads), (val, _) = counted(data_root, "train"), counted(data_root, "val")
    fit_psc(net, CANDIDATE, projection, train, val, settings=SETTINGS)
    often = [index for index, times in reads.items() if times > 1]
    assert len(reads) == len(train) and COUNT <= len(often) <= COUNT + 1  # One is also the trial input.


@pytest.mark.parametrize("count", [9, 5000])
def test_a_number_that_does_not_cover_the_classes_is_refused(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection, count: int
) -> None:
    with pytest.raises(UsageError, match=f"expected stored_images from 10, .* to 4096, got {count}"):
        fit_psc(net, CANDIDATE, projection, train, val, settings=SETTINGS.changed({"stored_images": count}))


def test_a_regression_keeps_their_numbers(angle_job: TinyJob, data_root: Path, tmp_path: Path) -> None:
    opened = partial(open_dataset, f"rotated-mnist:{data_root}", preprocess=PRESETS["mnist"])
    train, val = opened(split="train"), opened(split="val")
    quick = {"layer": "4", "c_proj": 4, "d_proj": 2, "coverage": 0.9, "stored_images": COUNT}
    model = PSCRegressor.fit(angle_job.net, train, val, **quick)
    check_kept(model, train)
    model.save(tmp_path / "bundle")
    stored_images = load_model(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY]).pipeline.stored_images
    assert stored_images is not None and train.values is not None
    kept = stored_images.tensors()
    assert torch.equal(kept["values"], train.values[kept["images"]])
    (document,) = stored_images.documents(torch.tensor([3]).numpy(), torch.tensor([0.5]).numpy(), model.classes)
    assert document["value"] == float(kept["values"][3]) and document["label"] in model.classes
