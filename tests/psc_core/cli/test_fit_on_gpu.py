"""A whole fit on a GPU that is not there: no tensor of the host meets one of the GPU, and the choices are the CPU's."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core.cli.fit import main
from psc_core.model import load_model
from tests.conftest import TinyJob
from tests.opened import loaded, opened
from tests.pretend_gpu import GPU, pretend_gpu


@pytest.mark.parametrize("words", [(), ("--head=duq", "--precision=bf16"), ("--head=sngp", "--density=gda")])
def test_classifiers(
    tiny_job: TinyJob, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("psc_core.heads.sngp.FEATURES", 64)
    fitted = on_gpu(tiny_job, tmp_path, words)
    if not words:
        chosen = json.loads((tiny_bundle / "manifest.json").read_text())
        assert fitted["layers"] == chosen["layers"]
        assert fitted["metrics"]["accuracy"] == chosen["metrics"]["accuracy"]


def test_a_regression(angle_job: TinyJob, tmp_path: Path) -> None:
    on_gpu(angle_job, tmp_path, ())


def on_gpu(job: TinyJob, folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    args = ["cuda" if word == "cpu" else word for word in job.args]
    with pretend_gpu():
        assert main([*args, *words, "--no-report", "--out", str(folder / "bundle")]) == 0
    fitted: dict[str, Any] = json.loads((folder / "bundle" / "manifest.json").read_text())
    return fitted


def test_a_check_is_learnt_there_as_here(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = cycle((0.0, 0.0, 1.0, 1.0))  # without the check and with it, however well the tiny network does
    monkeypatch.setattr("psc_core.calibrate.LARGEST_LOSS", 1.0)
    monkeypatch.setattr("psc_core.calibrate.placements", lambda of, _: torch.full((len(of),), next(turns)).double())
    digits, clothes = (
        opened(name).subset(torch.arange(count)) for name, count in (("mnist", 128), ("fashion-mnist", 20))
    )
    # What calibrates is equal to a score of its own, and rounding decides on which side.
    asked = next(digits.subset(torch.arange(120, 128)).batches(8)).images
    digits = digits.subset(torch.arange(120))
    with pretend_gpu():
        there = load_model(tiny_bundle, device="cuda", allow_factories=["tests.tiny:network"])
        learnt = there.learn(clothes, digits, risk=0.7)
        assert learnt.checks[-1] == "reviewed" and learnt.device == GPU
        reviewed = learnt.pipeline.scorer.reviewed
        assert reviewed is not None and reviewed.directions.device == GPU
        values = learnt.compute(asked).packed
    here = loaded(tiny_bundle).learn(clothes, digits, risk=0.7)
    torch.testing.assert_close(values, here.compute(asked).packed, rtol=1e-4, atol=1e-4)


def test_a_class_is_added_there_as_here(tiny_bundle: Path) -> None:
    digits, clothes = (opened(name) for name in ("mnist", "fashion-mnist"))
    digits, bags = digits.subset(torch.arange(120)), clothes.subset((clothes.first_labels() == 8).nonzero()[:20, 0])
    with pretend_gpu():
        there = load_model(tiny_bundle, device="cuda", allow_factories=["tests.tiny:network"])
        wide = there.add_class("bag", bags, digits, risk=0.7)
        assert wide.classes[-1] == "bag" and wide.device == GPU
        values = wide.compute(next(bags.batches(8)).images).packed
    here = loaded(tiny_bundle)
    here = here.add_class("bag", bags, digits, risk=0.7)
    torch.testing.assert_close(values, here.compute(next(bags.batches(8)).images).packed, rtol=1e-3, atol=1e-3)


def test_what_is_pretended() -> None:
    with pretend_gpu():
        there = torch.ones(3, 2, device="cuda")
        assert (there @ there.T).sum().item() == 18
        assert there.device == GPU and there.cpu().device.type == "cpu"
        with pytest.raises(RuntimeError, match="one device"):
            there + torch.ones(2)
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
