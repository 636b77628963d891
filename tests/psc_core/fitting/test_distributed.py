"""A whole fit by two processes (Gloo, with the environment of torch's launcher) is the fit by one."""

import json
import os
import socket
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from psc_core import projection
from psc_core.cli import fit as cli
from psc_core.model import PSC
from tests import warm
from tests.conftest import ROOT, TinyJob
from tests.opened import opened
from tests.tiny import network

PROGRAM = """
import sys
import torch
from tests.psc_core.fitting.test_distributed import main
torch.set_num_threads(1)
sys.exit(main(sys.argv[1], sys.argv[2:]))
"""
FACTORY = "tests.psc_core.fitting.test_distributed:double_network"


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


def launch(folder: Path, args: list[str]) -> list[str]:
    """Run :func:`main` in two processes; what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PROGRAM, str(folder), *args, "--distributed"]
    started = [
        warm.Process(
            command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True,
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in "01"
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return [printed for printed, _ in said]


def test_two_processes_fit_what_one_fits(tiny_job: TinyJob, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    weights = tmp_path / "net.safetensors"
    save_file({f"inner.{name}": tensor.double() for name, tensor in tiny_job.net.state_dict().items()}, weights)
    args = [*tiny_job.args, "--batch-images", "200", "--model", FACTORY, "--weights", str(weights)]
    assert main(str(one), [*args, "--out", str(one / "bundle")]) == 0
    first, second = launch(two, [*args, "--out", str(two / "bundle")])
    assert "wrote" in first and second == "" and not list(two.glob(".*"))

    alone, pair = (json.loads((folder / "bundle" / "manifest.json").read_text()) for folder in (one, two))
    measured = [
        [(each["name"], each["nc1"], each["quality"]) for each in body["collapse"]["layers"]] for body in (alone, pair)
    ]
    assert measured[0] == measured[1]
    assert pair["layers"] == alone["layers"] and pair["projection"] == alone["projection"]
    for name, value in alone["metrics"]["projection"].items():
        assert pair["metrics"]["projection"][name] == (pytest.approx(value, rel=1e-8) if value else value), name
    sums = load_file(one / "alone.safetensors")
    for rank in range(2):
        found = load_file(two / f"{rank}.safetensors")
        assert set(found) == {"mean", "covariance", "a", "b"}
        for name, expected in sums.items():
            assert expected.dtype == torch.float64
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-8 * float(expected.abs().max()))
    parts = [load_file(folder / "bundle" / "projection.safetensors") for folder in (one, two)]
    for name, expected in parts[0].items():  # Stored in float32: equal up to the last digit.
        torch.testing.assert_close(parts[1][name], expected, rtol=1e-6, atol=1e-7)

    images = next(opened("mnist").batches(64)).images
    told = [
        PSC.load(folder / "bundle", device="cpu", allow_factories=(FACTORY,)).predict(images) for folder in (one, two)
    ]
    for name, rtol, atol in (
        ("probabilities", 0, 1e-5),
        ("predictive_entropy", 0, 1e-5),
        ("log_density", 1e-5, 1e-5),
        ("ood_p_value", 0, 2 / 150),
    ):
        torch.testing.assert_close(getattr(told[1], name), getattr(told[0], name), rtol=rtol, atol=atol)
