"""The preprocessing of other libraries' objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import ResNet50_Weights
from torchvision.transforms import InterpolationMode

from psc_core import PRESETS, PSC, Preprocess, open_dataset, open_loader
from psc_core.errors import UsageError
from psc_core.images.described import as_preprocess
from tests.psc_core.data.support import write_folder

IMAGENET = PRESETS["imagenet"]


@pytest.mark.parametrize("other", ["imagenet", nn.Identity(), {}, Preprocess, lambda image: image])
def test_what_is_no_preprocess_is_refused_with_what_is(other: object) -> None:
    with pytest.raises(UsageError, match=r"expected a Preprocess, got a \w+; .* or take one of PRESETS"):
        as_preprocess(other)


def test_a_preprocess_is_taken_as_it_is() -> None:
    assert as_preprocess(IMAGENET) is IMAGENET


def test_transforms_of_torchvision() -> None:
    transforms = ResNet50_Weights.IMAGENET1K_V2.transforms()
    assert as_preprocess(transforms) == replace(IMAGENET, resize=232)
    transforms.interpolation = InterpolationMode.NEAREST
    with pytest.raises(
        UsageError, match="the ImageClassification resizes by the filter 'nearest'; say what it does to"
    ):
        as_preprocess(transforms)


def test_configurations_of_timm() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet18", num_classes=2)
    expected = replace(IMAGENET, resize=235, interpolation="bicubic")
    assert as_preprocess(net.pretrained_cfg) == as_preprocess(timm.get_pretrained_cfg("resnet18")) == expected
    assert as_preprocess(timm.data.resolve_data_config({}, model=net)) == expected


def test_image_processors_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    half = (0.5, 0.5, 0.5)
    found = as_preprocess(transformers.ViTImageProcessor(image_mean=half, image_std=half))
    assert found == Preprocess("RGB", 224, 224, None, half, half, "bilinear")
    with pytest.raises(UsageError, match="the ViTImageProcessor does not resize images; say what it does to a file"):
        as_preprocess(transformers.ViTImageProcessor(do_resize=False))


def test_every_door_takes_them(tmp_path: Path) -> None:
    given: Any = {"input_size": (3, 8, 8), "crop_pct": 1.0, "interpolation": "bilinear"}
    expected = as_preprocess(given)
    folder = open_dataset(str(write_folder(tmp_path, {"a": 2, "b": 2})), split="train", preprocess=given)
    pixels = torch.randint(0, 150, (200, 3, 8, 8), dtype=torch.uint8)
    images = [(image + 100 * (index % 2), index % 2) for index, image in enumerate(pixels)]
    loader = open_loader(images, preprocess=given)
    assert folder.preprocess == loader.preprocess == expected
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    psc = PSC.fit(net, images[:100], images[100:], preprocess=given, layer="0", head="duq")
    assert psc.preprocess == expected
