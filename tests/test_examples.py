"""The programs in ``examples`` run on the repository's data and find what they are there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.served import serve_shipped

EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}


def run(name: str, folder: Path, *arguments: str) -> str:
    """What an example prints; ``folder`` is where it is started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == EXAMPLES and len(listed) == len(EXAMPLES)


def test_in_memory(tmp_path: Path) -> None:
    said = run("in_memory.py", tmp_path)
    assert "Prediction for 200 images: " in said and "the most unusual digit: abstain_ood" in said
    digits, clothes = map(float, re.findall(r"([\d.]+)% are called out", said))
    assert digits < 15 and clothes > 85
    again = re.search(r"calibrated on 600 images: ([\d.]+)% of the digits\n$", said)
    assert again is not None and float(again[1]) < 15
    assert not list(tmp_path.iterdir())


def test_own_model(tmp_path: Path) -> None:
    said = run("own_model.py", tmp_path)
    assert "◀ candidate" in said and "nothing has collapsed" not in said
    digits, clothes = (
        re.findall(rf"^{kind}: .*, (\w+)$", said, re.MULTILINE) for kind in ("digit", "piece of clothing")
    )
    assert digits.count("accept") >= 4 and clothes.count("abstain_ood") >= 4
    assert said.endswith("loaded again: the same decisions\n")
    assert not list(tmp_path.iterdir())


def test_own_images(tmp_path: Path) -> None:
    said = run("own_images.py", tmp_path)
    right, _, accepted = map(float, re.findall(r"([\d.]+)%", said)[:3])
    assert 90 < right < accepted
    test, other = map(float, re.findall(r"([\d.]+)% are called out", said))
    assert test < 15 and other > 85
    assert not list(tmp_path.iterdir())


def test_ask_service(tmp_path: Path) -> None:
    with serve_shipped() as url:
        said = run("ask_service.py", tmp_path, url).splitlines()
        assert said[1:] == [
            "ambiguous.png: let a person choose among 8, 9",
            "clean.png: take 7",
            "corner.png: do not use the label, the image is like none seen (p-value 0.003)",
            "shirt.png: do not use the label, the image is like none seen (p-value 0.000)",
            "accepted: 1; with an ambiguity threshold of 1: 2",
        ]
        text = tmp_path / "text.png"
        text.write_text("no image")
        with pytest.raises(AssertionError, match="415 Unsupported image format"):
            run("ask_service.py", tmp_path, url, str(text))
