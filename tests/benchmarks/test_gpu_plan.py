"""The plan of the GPU measurements: checks in processes, parts with a limit, and the models that need no training."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import fit, run, smoke
from benchmarks.gpu.run import PARTS, Part
from psc_core.images.preprocess import PRESETS


def test_smoke_says_what_passed_was_skipped_and_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--out", str(tmp_path), "--only"]
    assert smoke.main([*words, "out of memory", "gauges"]) == 0
    shown = capsys.readouterr().out
    assert "| out of memory | passed |" in shown and "| gauges | skipped |" in shown and "needs CUDA" in shown
    assert smoke.run("hooks", "no device")["state"] == "failed"
    assert "RuntimeError" in smoke.run("hooks", "no device")["note"]
    assert smoke.run("hooks", "cpu", seconds=0.1) | {"seconds": 0} == {
        "state": "failed", "seconds": 0, "note": "no result after 0.1 s"
    }  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_parts_can_be_called(name: str, device: str) -> None:
    part = PARTS[name]
    if device == "cpu" and part.rehearsal is None:
        return
    words = part.words(device, Path("out"), Path("data"))
    assert find_spec(words[2]) is not None and not any("{" in word for word in words)
    assert name == "tests" or device in words
    assert part.minutes <= run.LIMIT_MINUTES


def test_parts_are_done_failed_out_of_time_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "good": Part("platform"),
        "bad": Part("no_such_module"),
        "long": Part("http.server 0 --bind 127.0.0.1"),
        "cuda": Part("platform", None),
        "data": Part("platform {data}"),
    }
    monkeypatch.setattr(run, "PARTS", parts)
    words = ["--device", "cpu", "--out", str(tmp_path), "--minutes"]
    assert run.main([*words, "5", "good", "bad"]) == 1
    assert run.main([*words, "0.02", "long", "cuda", "data"]) == 0  # Nothing that must end within the limit.
    shown = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert [how.split(",")[0] for how in shown.values()] == ["done", "failed", "out of time", "skipped", "skipped"]
    assert "no_such_module" in shown["bad"] and shown["data"] == "skipped, needs --data"
    assert "no_such_module" in (tmp_path / "bad-cpu.log").read_text()


def test_synthetic_images_differ_between_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fit.COUNT, "50")
    monkeypatch.setattr(fit, "DISTINCT", 20)
    train, val = (fit.images(split=split, preprocess=PRESETS["imagenet"]) for split in ("train", "val"))
    assert (len(train), len(train.classes)) == (50, fit.CLASSES)
    assert np.array_equal(train.image(0), train.image(20)) and not np.array_equal(train.image(0), val.image(0))


def test_passes_of_a_fit_are_read_from_its_log() -> None:
    log = "import sys; print('collapse 1/2 (3.0/s, 0 s)\\ncollapse 2/2 (4.0/s, 1 s)\\nend', file=sys.stderr)"
    (found,) = fit.passes_of([sys.executable, "-c", log], {})
    assert (found["what"], found["batches"], found["batches_per_s"]) == ("collapse", 2, 4.0)
    with pytest.raises(RuntimeError, match="no module"):
        fit.passes_of(shlex.split(f"{sys.executable} -c 'raise SystemExit(\"no module\")'"), {})
