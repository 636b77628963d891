"""The plan of the GPU measurements: checks in their process, parts with a limit, what is kept and skipped."""

from __future__ import annotations

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import bundles, checks, fit, run, smoke
from benchmarks.gpu.checks import Skipped, Worker, first_line, needs_cuda, outcome_of
from benchmarks.gpu.run import PARTS, Part
from psc_core.images.preprocess import PRESETS
from psc_core.model.predictor import PSC
from tests.conftest import ROOT

CPU = torch.device("cpu")


def passes(_: torch.device) -> str:
    return f"process {os.getpid()}"


def raises(_: torch.device) -> str:
    raise ValueError("a reason\nand more")


def skips(_: torch.device) -> str:
    raise Skipped("no such thing here")


def dies(_: torch.device) -> str:
    os._exit(7)


def hangs(_: torch.device) -> str:
    time.sleep(1e6)
    return ""


MINE = {"passes": passes, "raises": raises, "skips": skips, "dies": dies, "hangs": hangs}


def test_checks_go_on_after_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a check does, the next one runs; only one that failed costs a new process."""
    monkeypatch.setattr(checks, "STARTING_SECONDS", 120.0)
    worker = Worker(MINE, CPU)
    first, skipped, again = (worker.run(name, 120.0) for name in ("passes", "skips", "passes"))
    assert (first.state, skipped.state, skipped.note) == ("passed", "skipped", "no such thing here")
    assert first.note == again.note
    raised, died = worker.run("raises", 120.0), worker.run("dies", 120.0)
    assert (raised.state, raised.note) == ("failed", "ValueError: a reason")
    assert "test_gpu_plan" in raised.trace
    assert (died.state, died.note) == ("failed", "its process ended with 7")
    assert worker.run("passes", 120.0).note != first.note
    hung = worker.run("hangs", 0.1)
    assert (hung.state, hung.note) == ("failed", "no result after 0 s")
    assert worker.run("passes", 120.0).state == "passed"
    worker.close()


def test_only_cuda_is_skipped_on_a_cpu() -> None:
    needs_cuda(torch.device("cuda"))
    assert outcome_of(needs_cuda, CPU)[::2] == ("skipped", "needs CUDA")
    assert first_line(RuntimeError()) == "RuntimeError: "


def test_smoke_keeps_what_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[str] = []

    class Recorded:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, name: str, seconds: float) -> checks.Outcome:
            calls.append(name)
            return checks.Outcome("failed" if name == "graph" else "passed", 0.1, f"of {name}", "a traceback")

        def close(self) -> None:
            pass

    monkeypatch.setattr(smoke, "Worker", Recorded)
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert smoke.main(words) == 1
    assert calls == list(smoke.CHECKS)
    assert smoke.main([*words, "--only", "graph", "hooks"]) == 1
    assert calls[len(smoke.CHECKS) :] == ["graph"]  # the one that failed
    assert smoke.main([*words, "--again", "--only", "hooks"]) == 1
    assert calls[-1] == "hooks"
    assert "| graph | failed | 0.1 | of graph |" in capsys.readouterr().out
    kept = json.loads((tmp_path / "smoke-cpu.json").read_text())["checks"]
    assert list(kept) == sorted(smoke.CHECKS) and kept["graph"]["state"] == "failed"


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_parts_can_be_called(name: str, device: str) -> None:
    part = PARTS[name]
    command = part.command(device, Path("out"), Path("data"))
    assert find_spec(part.module) is not None
    assert not any("{" in word for word in command)
    assert part.minutes <= run.LIMIT_MINUTES
    assert part.rehearsal is None or device in command or f"--device={device}" in command


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Done, failed, out of time or skipped; the next call runs again what is not done."""
    parts = {
        "good": Part("platform", ""),
        "bad": Part("no_such_module", ""),
        "long": Part("http.server", "0 --bind 127.0.0.1"),
        "cuda": Part("platform", "", None),
        "data": Part("platform", "{data}"),
    }
    monkeypatch.setattr(run, "PARTS", parts)
    words = ["--device", "cpu", "--out", str(tmp_path), "--minutes"]
    assert run.main([*words, "2", "good", "bad", "cuda", "data"]) == 1
    assert run.main([*words, "0.02", "good", "long"]) == 1
    found = json.loads((tmp_path / "plan-cpu.json").read_text())["parts"]
    assert {name: each["state"] for name, each in found.items()} == {
        "good": "done", "bad": "failed", "long": "out of time", "cuda": "skipped", "data": "skipped"
    }  # fmt: skip
    assert found["cuda"]["note"] == "needs CUDA" and found["data"]["note"] == "needs --data"
    assert "no_such_module" in found["bad"]["note"]
    capsys.readouterr()
    run.main([*words, "2", "good"])
    assert "good …" not in capsys.readouterr().out
    run.main([*words, "2", "--again", "good"])
    assert "good …" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["nonsense"])


def test_make_runs_the_plan() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "-m benchmarks.gpu.run $(PART) --device $(DEVICE)" in text


def test_hooked_model_is_served_as_it_was_made(tmp_path: Path) -> None:
    made = bundles.hooked()
    again = PSC.load(bundles.write(made, tmp_path / "hooked"), device="cpu", allow_factories=bundles.FACTORIES)
    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert not again.pipeline.is_traced
    torch.testing.assert_close(again.predict(images).outputs.packed, made.predict(images).outputs.packed)


def test_synthetic_images_differ_between_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fit.COUNT, "50")
    monkeypatch.setattr(fit, "DISTINCT", 20)
    train, val = (fit.images(split=split, preprocess=PRESETS["imagenet"]) for split in ("train", "val"))
    assert (len(train), len(train.classes)) == (50, fit.CLASSES)
    assert np.array_equal(train.image(0), train.image(20)) and not np.array_equal(train.image(0), val.image(0))
    assert torch.equal(train.first_labels(), (torch.arange(50) % 20) % fit.CLASSES)
