"""Folders of timm: the description, and the network that is built by name with their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from psc_core.errors import NetworkError
from psc_core.network.described import NetworkSpec, describe_timm, is_of_timm
from psc_core.network.load import load_network, spec_of
from tests import folders


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


CONFIG = {"architecture": "resnet18", "num_classes": 3, "pretrained_cfg": {"input_size": [3, 64, 64]}}


def test_gives_what_timm_gives(timm_job: folders.Job) -> None:
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(f"local-dir:{timm_job.model}", pretrained=True).eval()
    ours = load_network(f"timm:local-dir:{timm_job.model}")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images)) and not ours.training
    assert spec_of(ours) == NetworkSpec("timm:test_resnet", 10, {"in_chans": 3, "global_pool": "avg"})


def test_a_fixed_size_is_an_argument(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=1, in_chans=1)
    folders.save_timm(tmp_path, net, input_size=[1, 32, 32], mean=[0.5], std=[0.5])
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] = {"depth": 1}  # as files before timm 1.0.30
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe_timm(tmp_path)
    assert described.preprocess is not None
    assert described.preprocess.shape == (1, 32, 32)
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(load_network(f"timm:local-dir:{tmp_path}")(images), net.eval()(images))


def test_a_size_among_the_arguments(tmp_path: Path) -> None:
    pretrained = {"input_size": [3, 224, 224], "fixed_input_size": True, "crop_pct": 1.0}
    for size in (96, [96, 96]):
        arguments = {"img_size": size, "num_classes": 5, "in_chans": 3}
        found = describe_timm(write(tmp_path, {**CONFIG, "pretrained_cfg": pretrained, "model_args": arguments}))
        assert found.num_classes == 5 and found.model_args == {"img_size": size, "in_chans": 3}
        assert found.preprocess is not None and found.preprocess.shape == (3, 96, 96)


def test_oldest_files_have_one_level(tmp_path: Path) -> None:
    flat = {"architecture": "resnet18", "num_classes": 2, "input_size": [3, 96, 96], "labels": ["cat", "dog"]}
    found = describe_timm(write(tmp_path, flat))
    assert (found.spec, found.num_classes, found.classes) == ("timm:resnet18", 2, ("cat", "dog"))
    assert found.preprocess is not None and found.preprocess.height == 96


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b", "c"], ("a", "b", "c")),
        ({"2": "c", "0": "a", "1": "b"}, ("a", "b", "c")),
        ({"0": "a", "2": "c", "9": "b"}, None),
        (None, None),
        ([], None),
    ],
)
def test_class_names(names: Any, expected: tuple[str, ...] | None, tmp_path: Path) -> None:
    assert describe_timm(write(tmp_path, {**CONFIG, "label_names": names})).classes == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": None}, "names no architecture of timm"),
        ({"num_classes": 0}, "a positive num_classes, got 0; use a classifier"),
        ({"num_classes": "3"}, "a positive num_classes"),
        ({"label_names": ["a"]}, "expected 3 label_names"),
        ({"label_names": "abc"}, "expected 3 label_names"),
        ({"label_names": [1, 2, 3]}, "expected 3 label_names"),
        ({"pretrained_cfg": []}, "to be JSON objects"),
        ({"model_args": [1]}, "to be JSON objects"),
        ({"pretrained_cfg": {"input_size": "224"}}, "field input_size"),
    ],
)
def test_rejects_what_is_malformed(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=message):
        describe_timm(write(tmp_path, {**CONFIG, **changes}))


def test_arguments_that_load_files_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    write(tmp_path, {**CONFIG, "model_args": {"checkpoint_path": "x.pth"}})
    with pytest.raises(NetworkError, match="checkpoint_path are not allowed"):
        load_network(f"timm:local-dir:{tmp_path}")


def test_weights_of_another_network_and_other_weights(timm_job: folders.Job, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(timm_job.model, tmp_path / "net"))
    tensors = load_file(folder / "model.safetensors")
    changed = {**tensors, "fc.bias": tensors["fc.bias"] + 1}
    save_file(changed, tmp_path / "other.safetensors")
    net = load_network(f"timm:local-dir:{folder}", weights=tmp_path / "other.safetensors")
    assert torch.equal(net.fc.bias, changed["fc.bias"])
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.bias"}, folder / "model.safetensors")
    with pytest.raises(NetworkError, match=r"model.safetensors does not fit the network: 1 missing \(fc.bias\)"):
        load_network(f"timm:local-dir:{folder}")


def test_tells_timm_from_others() -> None:
    assert is_of_timm({"architecture": "resnet18"})
    assert is_of_timm({"architecture": "resnet18", "model_type": "timm_wrapper"})
    assert not is_of_timm({"model_type": "vit"})
    assert not is_of_timm({"architecture": "x", "model_type": "vit"})
