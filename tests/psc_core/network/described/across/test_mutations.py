"""Configurations as the hub has them, each field replaced by odd JSON, give a description or an error that names it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psc_core.errors import NetworkError
from psc_core.network import described as hugging_face
from psc_core.network import described as timm
from psc_core.network.described import NetworkSpec

LABELS: Final = {"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1}}
IMAGENET: Final = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

VIT: Final = {
    "config.json": {
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 768,
        "image_size": 224,
        **LABELS,
        "model_type": "vit",
        "num_channels": 3,
        "patch_size": 16,
        "transformers_version": "4.13.0",
    },
    "preprocessor_config.json": {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "ViTFeatureExtractor",
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 224, "width": 224},
    },
}
CONVNEXT: Final = {
    "config.json": {"model_type": "convnext", "num_channels": 3, "image_size": 224, **LABELS},
    "preprocessor_config.json": {
        "crop_pct": 0.875,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "ConvNextFeatureExtractor",
        **IMAGENET,
        "resample": 3,
        "size": {"shortest_edge": 224},
    },
}
EFFICIENTNET: Final = {
    "config.json": {"model_type": "efficientnet", "num_channels": 3, "image_size": 224, "num_labels": 2},
    "preprocessor_config.json": {
        "crop_size": {"height": 289, "width": 289},
        "do_center_crop": False,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_processor_type": "EfficientNetImageProcessor",
        **IMAGENET,
        "include_top": True,
        "resample": 0,
        "rescale_factor": 0.00392156862745098,
        "rescale_offset": False,
        "size": {"height": 224, "width": 224},
    },
}
LEVIT: Final = {
    "config.json": {"model_type": "levit", "num_channels": 3, "image_size": 224, **LABELS},
    "preprocessor_config.json": {
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "image_processor_type": "LevitImageProcessor",
        **IMAGENET,
        "resample": 3,
        "size": {"shortest_edge": 224},
    },
}
TIMM: Final = {
    "config.json": {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 2,
        "num_features": 192,
        "global_pool": "token",
        "model_args": {"img_size": [224, 224], "in_chans": 3, "num_classes": 2},
        "label_names": {"0": "cat", "1": "dog"},
        "pretrained_cfg": {
            "tag": "augreg_in21k_ft_in1k",
            "custom_load": True,
            "input_size": [3, 224, 224],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "num_classes": 2,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
}
OLDEST_TIMM: Final = {
    "config.json": {
        "architecture": "resnet50",
        "num_classes": 2,
        "input_size": [3, 224, 224],
        "interpolation": "bicubic",
        "crop_pct": 0.95,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "labels": ["cat", "dog"],
    }
}
FOLDERS: Final = (VIT, CONVNEXT, EFFICIENTNET, LEVIT, TIMM, OLDEST_TIMM)

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 4, 224, 1 << 31, 1 << 63, 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308, 1e-5, 0.9]),
    st.integers(-(10**20), 10**20),
    st.floats(),  # json reads NaN and Infinity too
)
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "cat", "224", "vit", "é\ud800", "x" * 5000])),
    lambda inside: st.one_of(
        st.lists(inside, max_size=4),
        st.dictionaries(st.sampled_from(["0", "1", "height", "width", "shortest_edge", ""]), inside, max_size=3),
    ),
    max_leaves=4,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each field of a JSON document."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(value[key], (*above, key))


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    files = copy.deepcopy(draw(st.sampled_from(FOLDERS)))
    for _ in range(draw(st.integers(1, 3))):
        fields = [place for place in places(files) if len(place) > 1]
        if fields:
            replaced(files, draw(st.sampled_from(fields)), draw(ODD))
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("net")
    (made / "model.safetensors").touch()
    return made


def described(folder: Path, files: dict[str, Any]) -> list[NetworkSpec]:
    """The descriptions by each reader; an error has to name the folder's file, and to be of a bounded length."""
    for file in folder.glob("*.json"):
        file.unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    found = []
    readers: list[Callable[[Path], NetworkSpec]] = [hugging_face.describe_hugging_face, timm.describe_timm]
    for read in readers:
        try:
            found.append(read(folder))
        except NetworkError as error:
            assert ".json" in str(error) and len(str(error)) < 2000 and "Error" not in str(error), str(error)
    return found


@pytest.mark.parametrize("files", FOLDERS, ids=["vit", "convnext", "efficientnet", "levit", "timm", "oldest-timm"])
def test_each_is_described(folder: Path, files: dict[str, Any]) -> None:
    assert all(each.num_classes == 2 for each in described(folder, files))


def changed(files: dict[str, Any], *changes: tuple[tuple[Any, ...], Any]) -> dict[str, Any]:
    files = copy.deepcopy(files)
    for place, value in changes:
        replaced(files, place, value)
    return files


@given(files=mutated())
@example(files=changed(TIMM, (("config.json", "model_args", "img_size"), {"height": 3})))
@example(files=changed(TIMM, (("config.json", "model_args", "img_size"), 2.5)))
@example(files=changed(TIMM, (("config.json", "model_args", "num_classes"), 10**18)))
@example(files=changed(TIMM, (("config.json", "model_args", "num_classes"), True)))
@example(files=changed(TIMM, (("config.json", "pretrained_cfg", "crop_pct"), 1e-320)))
@example(files=changed(CONVNEXT, (("preprocessor_config.json", "crop_pct"), 1e-320)))
@example(files=changed(LEVIT, (("preprocessor_config.json", "size"), {"shortest_edge": 10**400})))
@example(files=changed(EFFICIENTNET, (("preprocessor_config.json", "rescale_factor"), 1e-320)))
@example(files=changed(EFFICIENTNET, (("preprocessor_config.json", "image_std"), [1e308] * 3)))
@example(files=changed(VIT, (("config.json", "id2label"), {})))
def test_odd_fields_are_described_or_refused(folder: Path, files: dict[str, Any]) -> None:
    for each in described(folder, files):
        assert type(each.num_classes) is int and each.num_classes > 0
        assert each.classes is None or len(each.classes) == each.num_classes
        assert each.preprocess is not None


@pytest.mark.parametrize(
    ("files", "place", "value", "message"),
    [
        (TIMM, ("model_args", "img_size"), {"height": 3}, r"img_size among the model_args of .*config\.json"),
        (TIMM, ("model_args", "num_classes"), True, r"config\.json to have a positive num_classes, got True"),
        (TIMM, ("pretrained_cfg", "mean"), 0.5, r"config\.json: field mean: "),
        (TIMM, ("pretrained_cfg", "crop_pct"), 1e-320, r"config\.json: expected input_size and crop_pct of usual"),
        (VIT, ("id2label",), {}, r"id2label of .*config\.json to name the outputs"),
        (VIT, ("num_channels",), {"a": 1}, r"config\.json: expected a network for images of 1 or 3 channels"),
    ],
)
def test_the_error_names_the_field(
    folder: Path, files: dict[str, Any], place: tuple[str, ...], value: Any, message: str
) -> None:
    files = changed(files, (("config.json", *place), value))
    for file in folder.glob("*.json"):
        file.unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(NetworkError, match=message):
        hugging_face.describe_hugging_face(folder)
