import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import ResNet50_Weights
from torchvision.transforms import InterpolationMode

from psc_core import PRESETS, PSC, open_dataset, open_loader
from psc_core.errors import NetworkError, UsageError
from psc_core.images.described import as_preprocess, read_processor, read_timm
from psc_core.images.preprocess import Preprocess, read_image
from tests.psc_core.data.support import write_folder

CONFIG = {"model_type": "vit", "num_channels": 3, "image_size": 224}
STATISTICS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
OURS = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
SQUARE = {"height": 224, "width": 224}


def vit(**changes: Any) -> dict[str, Any]:
    return {"image_processor_type": "ViTImageProcessor", "size": SQUARE, "resample": 2, **STATISTICS, **changes}


def of_kind(kind: str, **fields: Any) -> dict[str, Any]:
    return {"image_processor_type": f"{kind}ImageProcessor", "resample": 3, **STATISTICS, **fields}


PROCESSORS = {
    "ViT": vit(),
    "ViT, the oldest files": {"do_normalize": True, "do_resize": True, "size": 224, **STATISTICS},
    "ViT, wide": vit(size={"height": 160, "width": 320}),
    "ViT, bicubic": vit(resample=3),
    "ViT, not standardised": vit(do_normalize=False),
    "ViT, scaled to [-1, 1]": vit(rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3),
    "ViT, not scaled": vit(do_rescale=False, image_mean=[127.5] * 3, image_std=[127.5] * 3),
    "DeiT without a crop": of_kind("DeiT", size=SQUARE, do_center_crop=False),
    "DeiT, crop of all": of_kind("DeiT", size=SQUARE, crop_size=SQUARE, do_center_crop=True),
    "CLIP": of_kind("CLIP", size={"shortest_edge": 224}, crop_size=SQUARE, do_center_crop=True),
    "CLIP, numbers": of_kind("CLIP", size=240, crop_size=224, do_center_crop=True),
    "BiT": of_kind("Bit", size={"shortest_edge": 256}, crop_size=SQUARE, do_center_crop=True),
    "MobileNetV2": of_kind("MobileNetV2", size={"shortest_edge": 256}, crop_size=SQUARE, do_center_crop=True),
    "ConvNext": of_kind("ConvNext", size={"shortest_edge": 224}, crop_pct=0.875),
    "ConvNext, large": of_kind("ConvNext", size={"shortest_edge": 384}, crop_pct=0.875),
    "Levit": of_kind("Levit", size={"shortest_edge": 224}, crop_size=SQUARE, do_center_crop=True),
    "PoolFormer": of_kind("PoolFormer", size={"shortest_edge": 224}, crop_size=224, crop_pct=0.9, do_center_crop=True),
    "EfficientNet": of_kind("EfficientNet", size=SQUARE, do_center_crop=False, include_top=False),
    "EfficientNet, standardised twice": of_kind("EfficientNet", size=SQUARE, do_center_crop=False, include_top=True),
    "EfficientNet, shifted": of_kind(
        "EfficientNet", size=SQUARE, rescale_factor=1 / 127.5, rescale_offset=True, include_top=False
    ),
    "SigLIP": of_kind("Siglip", size=SQUARE),
}  # fmt: skip


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("china.jpg"))


def inputs(preprocess: Preprocess, image: Image.Image) -> torch.Tensor:
    return preprocess.standardise(torch.from_numpy(preprocess.from_image(image))[None])


@pytest.mark.parametrize("turned", [False, True], ids=["wide", "tall"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_gives_what_the_image_processor_gives(name: str, turned: bool, photograph: Image.Image, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="image processors are transformers'")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    image = photograph.rotate(90, expand=True) if turned else photograph
    preprocess, unlike = read_processor(PROCESSORS[name], CONFIG, name)
    assert unlike == {}
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True)
    theirs = processor(image, return_tensors="pt")["pixel_values"]
    ours = inputs(preprocess, image)
    assert ours.shape == theirs.shape
    grey_levels = (ours - theirs).abs() * torch.tensor(preprocess.std)[:, None, None] * 255
    assert float(grey_levels.mean()) < 1


@pytest.mark.parametrize("crop", [{"crop_pct": 0.9}, {"crop_pct": 1.0, "crop_mode": "squash"}, {}])
def test_gives_what_the_transform_of_timm_gives(crop: dict[str, Any], photograph: Image.Image) -> None:
    timm_data = pytest.importorskip("timm.data", reason="the transform is timm's")
    written = {"input_size": [3, 160, 160], "mean": OURS[0], "std": OURS[1], "interpolation": "bilinear", **crop}
    preprocess, unlike = read_timm(written, "config.json")
    assert unlike == {}
    resolved = timm_data.resolve_data_config({}, pretrained_cfg=written)
    theirs = timm_data.create_transform(**resolved)(photograph)[None]
    grey_levels = (inputs(preprocess, photograph) - theirs).abs() * torch.tensor(OURS[1])[:, None, None] * 255
    assert float(grey_levels.mean()) < 1


@pytest.mark.parametrize(
    ("written", "part", "reason"),
    [
        ({**vit(), "image_processor_type": "MobileViTImageProcessor"}, "whole", "does not know, MobileViT"),
        ({**vit(), "image_processor_type": None}, "whole", "without a name"),
        (vit(do_flip_channel_order=True), "whole", "that PSC does not support: do_flip_channel_order"),
        (vit(do_resize=False), "size", "does not resize"),
        (vit(size={"shortest_edge": 224, "longest_edge": 300}), "size", "not of one input"),
        (of_kind("DeiT", size={"height": 256, "width": 256}, crop_size=224), "size", "256 × 256 pixels, whatever"),
        (of_kind("DeiT", size=SQUARE, crop_size=256), "size", "then crops to 256"),
        (of_kind("CLIP", size=224), "size", "keeps proportions and does not crop"),
        (of_kind("CLIP", size=224, crop_size=256), "size", "more than the shorter side of 224"),
        (vit(resample=0), "interpolation", "by the filter 'nearest'"),
        (vit(resample=9), "interpolation", "by the filter '9'"),
        (of_kind("CLIP", size=224, crop_size=224, resample=None), "interpolation", "does not say by which filter"),
        (vit(image_mean=None), "statistics", "does not say by which mean"),
        (vit(image_mean=[0.5]), "statistics", "has 1 means and 3 deviations for 3 channels"),
    ],
)
def test_tells_what_it_cannot_do(written: dict[str, Any], part: str, reason: str) -> None:
    _, unlike = read_processor(written, {**CONFIG, "model_type": "bert"}, "here.json")
    assert list(unlike) == [part]
    assert unlike[part].startswith("here.json ") and reason in unlike[part]  # type: ignore[index]


def test_keeps_what_is_near() -> None:
    written = of_kind("DeiT", size={"height": 256, "width": 256}, crop_size=224)
    assert read_processor(written, CONFIG, "")[0] == Preprocess("RGB", 224, 224, 256, *OURS, "bicubic")


@pytest.mark.parametrize(
    ("written", "part", "reason"),
    [
        ({"crop_mode": "border"}, "size", "crops by 'border'"),
        ({"crop_mode": "squash", "crop_pct": 0.9}, "size", "resizes to 248 × 248 and then crops to 224 × 224"),
        ({"input_size": [3, 224, 320]}, "size", "224 × 320 pixels, which is not a square"),
        ({"interpolation": "random"}, "interpolation", "by the filter 'random'"),
        ({"input_size": [1, 28, 28]}, "statistics", "has 3 means and 3 deviations for 1 channels"),
    ],
)
def test_tells_what_it_cannot_do_of_timm(written: dict[str, Any], part: str, reason: str) -> None:
    _, unlike = read_timm(written, "here.json")
    assert list(unlike) == [part] and reason in unlike[part]  # type: ignore[index]


@pytest.mark.parametrize(
    ("written", "config", "message"),
    [
        (vit(size="large"), CONFIG, "here.json: field size"),
        (vit(image_mean=["x"]), CONFIG, "here.json: field image_mean"),
        (vit(size={"height": 0, "width": 224}), CONFIG, "here.json: expected height × width"),
        (vit(image_std=[0, 0, 0]), CONFIG, "here.json: expected positive stds"),
        (vit(), {**CONFIG, "num_channels": 4}, "images of 1 or 3 channels, got 4"),
        (vit(rescale_factor=float("inf")), CONFIG, "field rescale_factor"),
    ],
)
def test_rejects_what_means_nothing(written: dict[str, Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        read_processor(written, config, "here.json")


@pytest.mark.parametrize("written", [{"input_size": 224}, {"mean": "x"}, {"crop_pct": -0.0001}, {"std": [0, 0, 0]}])
def test_rejects_what_means_nothing_of_timm(written: dict[str, Any]) -> None:
    with pytest.raises(NetworkError, match=r"here\.json: (expected|field)"):
        read_timm(written, "here.json")


@pytest.mark.parametrize(
    ("written", "background"),
    [
        (vit(), "black"),  # transformers refuses alpha
        (vit(do_convert_rgb=True), "white"),
        (of_kind("Siglip", size=SQUARE), "white"),
        (of_kind("Siglip", size=SQUARE, do_convert_rgb=False), "black"),
    ],
)
def test_alpha_is_read_as_the_image_processor_reads_it(written: dict[str, Any], background: str) -> None:
    transformers = pytest.importorskip("transformers")
    preprocess, _ = read_processor(written, CONFIG, "")
    assert preprocess.background == background
    if background == "white":
        processor = getattr(transformers, written["image_processor_type"])(**written)
        image = Image.new("RGBA", (224, 224), (90, 90, 90, 128))
        theirs = processor(image, return_tensors="pt")["pixel_values"]
        ours = preprocess.standardise(torch.from_numpy(read_image(image, preprocess))[None])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # one of 255 levels


def test_grey_images() -> None:
    written = vit(image_mean=0.1307, image_std=0.3081)
    preprocess, unlike = read_processor(written, {**CONFIG, "num_channels": 1}, "")
    assert preprocess == Preprocess("L", 224, 224, None, (0.1307,), (0.3081,))
    assert unlike == {}
    assert np.asarray(preprocess.from_image(Image.new("RGB", (9, 9)))).shape == (1, 224, 224)


IMAGENET = PRESETS["imagenet"]


@pytest.mark.parametrize("other", ["imagenet", nn.Identity(), {}, Preprocess, lambda image: image])
def test_what_is_no_preprocess_is_refused_with_what_is(other: object) -> None:
    with pytest.raises(UsageError, match=r"expected a Preprocess, got a \w+; .* or take one of PRESETS"):
        as_preprocess(other)


def test_transforms_of_torchvision() -> None:
    transforms = ResNet50_Weights.IMAGENET1K_V2.transforms()
    assert as_preprocess(transforms) == replace(IMAGENET, resize=232, background="none")
    image = Image.effect_noise((232, 235), 50).convert("RGB")  # 11 columns are left over: where is the crop?
    torch.testing.assert_close(inputs(as_preprocess(transforms), image)[0], transforms(image))
    transforms.interpolation = InterpolationMode.NEAREST
    with pytest.raises(UsageError, match="resizes by the filter 'nearest'"):
        as_preprocess(transforms)


def test_configurations_of_timm() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet18", num_classes=2)
    expected = replace(IMAGENET, resize=235, interpolation="bicubic", background="none")
    assert as_preprocess(net.pretrained_cfg) == as_preprocess(timm.get_pretrained_cfg("resnet18")) == expected
    config = timm.data.resolve_data_config({}, model=net)
    assert as_preprocess(config) == expected
    image = Image.effect_noise((235, 235 + 4), 50).convert("RGB")
    torch.testing.assert_close(inputs(expected, image)[0], timm.data.create_transform(**config)(image))


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
