"""A whole fit by two processes (Gloo, under torch's launcher) is the fit by one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from psc_core import projection
from psc_core.cli import fit as cli
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.model import PSC
from tests.conftest import ROOT, TinyJob
from tests.tiny import network

PROGRAM = """
import os, sys
import torch
from tests.psc_core.fitting.across.test_distributed import main
torch.set_num_threads(1)
sys.exit(main(sys.argv[1], sys.argv[2:]))
"""
FACTORY = "tests.psc_core.fitting.across.test_distributed:double_network"


class Double(nn.Module):
    """:func:`tests.tiny.network` in float64, so that only the order of sums can differ."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.inner = network(num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double())


def double_network(num_classes: int = 10) -> nn.Module:
    return Double(num_classes)


def main(folder: str, args: list[str]) -> int:
    """``psc-fit`` that also writes what it sums over processes, in float64, to ``folder``."""
    where = Path(folder) / os.environ.get("RANK", "alone")
    moments, factors = projection.channel_moments, projection.tucker_factors
    seen: dict[str, Tensor] = {}

    def recorded_moments(*args: Any, **kwargs: Any) -> Any:
        result = moments(*args, **kwargs)
        seen.update(mean=result.mean, covariance=result.covariance)
        return result

    def recorded_factors(*args: Any) -> Any:
        seen["a"], seen["b"] = result = factors(*args)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "channel_moments", recorded_moments)
        patch.setattr(projection, "tucker_factors", recorded_factors)
        code = cli.main(args)
    save_file({name: tensor.contiguous() for name, tensor in seen.items()}, f"{where}.safetensors")
    return code


@dataclass(frozen=True)
class Fits:
    """Folders of one process's fit and of two processes'."""

    alone: Path
    pair: Path

    def manifest(self, folder: Path) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((folder / "bundle" / "manifest.json").read_text())
        return body


def launch(folder: Path, args: list[str]) -> list[str]:
    """Run :func:`main` in two processes; what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = folder / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(port),
            "--log-dir",
            str(folder / "logs"),
            "--redirects",
            "3",
            str(script),
            str(folder),
            *args,
            "--distributed",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    logs = [next(folder.glob(f"logs/**/{rank}/stdout.log")).read_text() for rank in range(2)]
    errors = "".join(log.read_text() for log in folder.glob("logs/**/stderr.log"))
    assert done.returncode == 0, done.stderr + errors
    return logs


@pytest.fixture(scope="module")
def fits(tiny_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Fits:
    folders = Fits(tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("pair"))
    weights = folders.alone / "net.safetensors"
    save_file({f"inner.{name}": tensor.double() for name, tensor in tiny_job.net.state_dict().items()}, weights)
    args = list(tiny_job.args)
    args[args.index("--model") + 1] = FACTORY
    args[args.index("--weights") + 1] = str(weights)
    args += ["--batch-images", "200"]
    assert main(str(folders.alone), [*args, "--out", str(folders.alone / "bundle")]) == 0
    first, second = launch(folders.pair, [*args, "--out", str(folders.pair / "bundle")])
    assert "wrote" in first
    assert second == ""
    assert not list(folders.pair.glob(".*"))
    return folders


def test_collapse_agrees(fits: Fits) -> None:
    alone, pair = (fits.manifest(folder)["collapse"]["layers"] for folder in (fits.alone, fits.pair))
    assert [layer["name"] for layer in pair] == [layer["name"] for layer in alone]
    for one, two in zip(alone, pair, strict=True):
        assert two["nc1"] == one["nc1"]
        assert two["nc4"] == one["nc4"]


def test_moments_and_factors_agree(fits: Fits) -> None:
    alone = load_file(fits.alone / "alone.safetensors")
    for rank in range(2):
        pair = load_file(fits.pair / f"{rank}.safetensors")
        assert set(pair) == {"mean", "covariance", "a", "b"}
        for name, expected in alone.items():
            assert expected.dtype == torch.float64
            scale = float(expected.abs().max())
            torch.testing.assert_close(pair[name], expected, rtol=0, atol=1e-8 * scale)


def test_projection_agrees(fits: Fits) -> None:
    one, two = (fits.manifest(folder) for folder in (fits.alone, fits.pair))
    assert two["layers"] == one["layers"]
    assert two["projection"] == one["projection"]
    for name, value in one["metrics"]["projection"].items():
        assert two["metrics"]["projection"][name] == (pytest.approx(value, rel=1e-8) if value else value)
    alone, pair = (load_file(folder / "bundle" / "projection.safetensors") for folder in (fits.alone, fits.pair))
    for name, expected in alone.items():
        # stored in float32: equal up to its last digit
        torch.testing.assert_close(pair[name], expected, rtol=1e-6, atol=1e-7)


def test_predictions_agree(fits: Fits, data_root: Path) -> None:
    digits = open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    images = next(digits.batches(64)).images
    alone, pair = (
        PSC.load(folder / "bundle", device="cpu", allow_factories=(FACTORY,)).predict(images)
        for folder in (fits.alone, fits.pair)
    )
    torch.testing.assert_close(pair.probabilities, alone.probabilities, rtol=0, atol=1e-5)
    torch.testing.assert_close(pair.predictive_entropy, alone.predictive_entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(pair.log_density, alone.log_density, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pair.ood_p_value, alone.ood_p_value, rtol=0, atol=2 / 150)
