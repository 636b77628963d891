"""One trained network through every door of ``psc-fit`` and ``PSC.fit``: a service that holds all decides the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
from psc_core.images.preprocess import Preprocess
from tests import folders
from tests.served import HTTP, serve

FLAGS: Final = ("--device", "cpu", "--no-report", "--alpha", "0.1", "--coverage", "0.9")


@dataclass(frozen=True)
class Images:
    """Folders of images, named in the order of the network's outputs."""

    train: Path
    val: Path
    size: Preprocess = folders.SIZE

    @classmethod
    def of(cls, job: folders.Job, root: Path, size: Preprocess = folders.SIZE) -> Images:
        for split, source in (("train", job.train), ("val", job.val)):
            (root / split).mkdir(parents=True)
            for label, name in enumerate(folders.NAMES):
                (root / split / str(label)).symlink_to(source / name)
        return cls(root / "train", root / "val", size)

    @property
    def flags(self) -> tuple[str, ...]:
        """The preprocessing, for networks that do not say it themselves."""
        halves = ("0.5",) * 3
        return ("--size", str(self.size.height), "--mean", *halves, "--std", *halves)


def fitted(out: Path, images: Images, model: str, *flags: str) -> Path:
    words = ["--model", model, "--train", str(images.train), "--val", str(images.val), *flags, *FLAGS]
    assert main([*words, "--out", str(out)]) == 0
    return out


def in_memory(out: Path, images: Images, net: nn.Module) -> Path:
    loaders = []
    for split in ("train", "val"):
        data = open_dataset(str(getattr(images, split)), split=split, preprocess=images.size)
        inputs = torch.cat([images.size.standardise(batch.images) for batch in data.batches(64)])
        loaders.append(DataLoader(TensorDataset(inputs, data.labels), batch_size=50))
    psc = PSC.fit(net, *loaders, mean=0.5, std=0.5, alpha=0.1, coverage=0.9, device="cpu")
    psc.save(out)
    return out


def as_onnx(file: Path, net: nn.Module, size: Preprocess = folders.SIZE) -> Path:
    with warnings.catch_warnings(action="ignore"):
        images, axes = (torch.zeros(2, *size.shape),), ({0: torch.export.Dim.DYNAMIC},)
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
            answer = HTTP.post(f"{server.url}/models/{name}/predict", files=parts)
            assert answer.status_code == 200, answer.text
            found[name] = answer.json()["predictions"]
    return found


def unseen(images: Images, folder: Path) -> list[Path]:
    """Every tenth validation image, a little darker: the image itself calibrates, and ties with its own score."""
    folder.mkdir()
    files = [file for each in sorted(images.val.iterdir()) for file in sorted(each.iterdir())][::10]
    for file in files:
        Image.open(file).point(lambda value: value * 0.95).save(folder / f"{file.parent.name}-{file.name}")
    return sorted(folder.iterdir())


def check_same(
    bundles: Mapping[str, Path], images: Images, tmp_path: Path, other_features: Collection[str] = ()
) -> None:
    """Check that all decide the same; those in ``other_features`` predict the same, their OOD score is of others."""
    noise = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(noise)
    files = [*unseen(images, tmp_path / "unseen"), noise]
    (name, first), *others = predictions(bundles, files).items()
    assert {"accept", "abstain_ood"} <= {each["decision"] for each in first}
    for other, second in others:
        for one, two in zip(first, second, strict=True):
            assert one["class_index"] == two["class_index"], (name, other)
            assert one["probabilities"] == pytest.approx(two["probabilities"], abs=2e-3), (name, other)
            if other in other_features:
                continue
            assert one["decision"] == two["decision"], (name, other)
            assert one["ood_p_value"] == pytest.approx(two["ood_p_value"], abs=0.02), (name, other)


def copied(net: nn.Module) -> nn.Module:
    """The same network, of which nobody knows how it was built."""
    other = copy.deepcopy(net)
    del other.psc_spec
    return other


@dataclass(frozen=True)
class Exported:
    """A network of timm as an ONNX file, and the bundle that is fitted to it."""

    images: Images
    net: nn.Module
    file: Path
    bundle: Path


@pytest.fixture(scope="module")
def exported(timm_job: folders.Job, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root = tmp_path_factory.mktemp("exported")
    images, net = Images.of(timm_job, root / "images"), load_network(f"timm:local-dir:{timm_job.model}")
    file = as_onnx(root / "net.onnx", net)
    return Exported(images, net, file, fitted(root / "onnx", images, f"onnx:{file}", *images.flags))


def test_of_a_network_of_timm(timm_job: folders.Job, exported: Exported, tmp_path: Path) -> None:
    images, net = exported.images, exported.net
    checkpoint = as_checkpoint(tmp_path / "last.pth", net)
    bundles = {
        "module": in_memory(tmp_path / "module", images, copied(net)),
        "checkpoint": fitted(
            tmp_path / "checkpoint", images, "timm:test_resnet", "--weights", str(checkpoint), *images.flags
        ),
        "onnx": exported.bundle,
        "folder": fitted(tmp_path / "folder", images, f"timm:local-dir:{timm_job.model}"),
        "hf": fitted(tmp_path / "hf", images, f"hf:{timm_job.model}"),
    }
    check_same(bundles, images, tmp_path)


def test_of_a_transformer(hf_job: folders.Job, tmp_path: Path) -> None:
    images, net = Images.of(hf_job, tmp_path / "images"), load_network(f"hf:{hf_job.model}")
    bundles = {
        "hf": fitted(tmp_path / "hf", images, f"hf:{hf_job.model}"),
        "module": in_memory(tmp_path / "module", images, net),
        "onnx": fitted(tmp_path / "onnx", images, f"onnx:{as_onnx(tmp_path / 'net.onnx', net)}", *images.flags),
    }
    check_same(bundles, images, tmp_path)


def test_detectors_beside_an_onnx_network(exported: Exported, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    images, file = exported.images, exported.file
    splits = ("--id", str(images.val), "--train", str(images.train), "--val", str(images.val))
    words = ["--bundle", str(exported.bundle), *splits]
    noise = tmp_path / "noise"
    noise.mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(noise / f"{number}.png")
    words += ["--ood", f"noise={noise}", "--device", "cpu"]
    assert evaluate([*words, "--verbose", "--weights", str(file)]) == 0
    assert "energy" in capsys.readouterr().out.lower()
    assert evaluate([*words, "--weights", str(as_checkpoint(tmp_path / "net.pth", exported.net))]) == 2
    assert "expected --weights to be an ONNX file" in capsys.readouterr().err
