"""One trained network through every door: the service decides the same on the same images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from psc_core import load_network
from psc_core.cli.evaluate import main as evaluate
from tests import folders
from tests.doors import Images, as_checkpoint, as_onnx, check_same, copied, fitted, in_memory


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
    assert evaluate([*words, "--weights", str(file)]) == 0
    assert "energy" in capsys.readouterr().out.lower()
    assert evaluate([*words, "--weights", str(as_checkpoint(tmp_path / "net.pth", exported.net))]) == 2
    assert "expected --weights to be an ONNX file" in capsys.readouterr().err
