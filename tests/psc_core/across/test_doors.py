"""One trained network through every door: the service decides the same on the same images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psc_core import PSC, load_network, open_dataset
from psc_core.cli.evaluate import main as evaluate
from psc_core.cli.fit import main
from tests import folders
from tests.served import serve

FLAGS = ("--device", "cpu", "--no-report", "--alpha", "0.1", "--coverage", "0.9")
SIZE = ("--size", "32", "--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5")


@dataclass(frozen=True)
class Images:
    """Folders of images, named in the order of the network's outputs."""

    train: Path
    val: Path

    @classmethod
    def of(cls, job: folders.Job, root: Path) -> Images:
        for split, source in (("train", job.train), ("val", job.val)):
            (root / split).mkdir(parents=True)
            for label, name in enumerate(folders.NAMES):
                (root / split / str(label)).symlink_to(source / name)
        return cls(root / "train", root / "val")


def fitted(out: Path, images: Images, model: str, *flags: str) -> Path:
    words = ["--model", model, "--train", str(images.train), "--val", str(images.val), *flags, *FLAGS]
    assert main([*words, "--out", str(out)]) == 0
    return out


def in_memory(out: Path, images: Images, net: nn.Module) -> Path:
    loaders = []
    for split in ("train", "val"):
        data = open_dataset(str(getattr(images, split)), split=split, preprocess=folders.SIZE)
        inputs = torch.cat([folders.SIZE.standardise(batch.images) for batch in data.batches(64)])
        loaders.append(DataLoader(TensorDataset(inputs, data.labels), batch_size=50))
    psc = PSC.fit(net, *loaders, mean=0.5, std=0.5, alpha=0.1, coverage=0.9, device="cpu")
    psc.save(out)
    return out


def as_onnx(file: Path, net: nn.Module) -> Path:
    with warnings.catch_warnings(action="ignore"):
        images, axes = (torch.zeros(2, *folders.SIZE.shape),), ({0: torch.export.Dim.DYNAMIC},)
        program = torch.onnx.export(net, images, dynamo=True, dynamic_shapes=axes, verbose=False)
    assert program is not None
    onnx.save(program.model_proto, file)
    return file


def as_checkpoint(file: Path, net: nn.Module) -> Path:
    state = {f"module.{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 90}, file)
    return file


def predictions(bundles: Mapping[str, Path], files: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Answers of one service for the same images, by model."""
    parts = [("images", (file.name, file.read_bytes(), "image/png")) for file in files]
    found = {}
    with serve(*(f"--bundle={name}={path}" for name, path in bundles.items())) as server:
        for name in bundles:
            answer = httpx.post(f"{server.url}/models/{name}/predict", files=parts, timeout=60)
            assert answer.status_code == 200, answer.text
            found[name] = answer.json()["predictions"]
    return found


def check_same(bundles: Mapping[str, Path], images: Images, tmp_path: Path) -> None:
    noise = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(noise)
    files = [*[file for folder in sorted(images.val.iterdir()) for file in sorted(folder.iterdir())][::10], noise]
    (name, first), *others = predictions(bundles, files).items()
    assert {"accept", "abstain_ood"} <= {each["decision"] for each in first}
    for other, second in others:
        for one, two in zip(first, second, strict=True):
            assert one["class_index"] == two["class_index"] and one["decision"] == two["decision"], (name, other)
            assert one["probabilities"] == pytest.approx(two["probabilities"], abs=2e-3), (name, other)
            assert one["ood_p_value"] == pytest.approx(two["ood_p_value"], abs=0.02), (name, other)


def test_of_a_network_of_timm(timm_job: folders.Job, tmp_path: Path) -> None:
    images, net = Images.of(timm_job, tmp_path / "images"), load_network(f"timm:local-dir:{timm_job.model}")
    checkpoint = as_checkpoint(tmp_path / "last.pth", net)
    bundles = {
        "module": in_memory(tmp_path / "module", images, copied(net)),
        "checkpoint": fitted(tmp_path / "checkpoint", images, "timm:test_resnet", "--weights", str(checkpoint), *SIZE),
        "onnx": fitted(tmp_path / "onnx", images, f"onnx:{as_onnx(tmp_path / 'net.onnx', net)}", *SIZE),
        "folder": fitted(tmp_path / "folder", images, f"timm:local-dir:{timm_job.model}"),
        "hf": fitted(tmp_path / "hf", images, f"hf:{timm_job.model}"),
    }
    check_same(bundles, images, tmp_path)


def test_of_a_transformer(hf_job: folders.Job, tmp_path: Path) -> None:
    images, net = Images.of(hf_job, tmp_path / "images"), load_network(f"hf:{hf_job.model}")
    bundles = {
        "hf": fitted(tmp_path / "hf", images, f"hf:{hf_job.model}"),
        "module": in_memory(tmp_path / "module", images, net),
        "onnx": fitted(tmp_path / "onnx", images, f"onnx:{as_onnx(tmp_path / 'net.onnx', net)}", *SIZE),
    }
    check_same(bundles, images, tmp_path)


def copied(net: nn.Module) -> nn.Module:
    """The same network, of which nobody knows how it was built."""
    other = copy.deepcopy(net)
    del other.psc_recipe
    return other


def test_detectors_beside_an_onnx_network(timm_job: folders.Job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    images, net = Images.of(timm_job, tmp_path / "images"), load_network(f"timm:local-dir:{timm_job.model}")
    file = as_onnx(tmp_path / "net.onnx", net)
    bundle = fitted(tmp_path / "onnx", images, f"onnx:{file}", *SIZE)
    words = ["--bundle", str(bundle), "--id", str(images.val), "--train", str(images.train), "--val", str(images.val)]
    noise = tmp_path / "noise"
    noise.mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(noise / f"{number}.png")
    words += ["--ood", f"noise={noise}", "--device", "cpu"]
    assert evaluate([*words, "--weights", str(file)]) == 0
    assert "energy" in capsys.readouterr().out.lower()
    assert evaluate([*words, "--weights", str(as_checkpoint(tmp_path / "net.pth", net))]) == 2
    assert "expected --weights to be an ONNX file" in capsys.readouterr().err
