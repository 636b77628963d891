"""Ray Data runs the same scorer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.psc_core.scoring.support import COUNT, PART, bytes_of


def test_ray_writes_what_one_process_writes(
    folder: Path, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    command = [sys.executable, "-m", "psc_core.cli.score", str(folder), "--bundle", str(SHIPPED_BUNDLE)]
    options = ["--out", str(tmp_path / "out"), "--part-images", str(PART), "--format", "jsonl", "--device", "cpu"]
    done = subprocess.run(
        [*command, *options, "--ray", "2"], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{COUNT + 1} images" in done.stdout
    assert bytes_of(tmp_path / "out") == bytes_of(scored)
