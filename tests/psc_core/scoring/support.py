"""Running ``psc-score`` and reading what it wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from psc_core.cli import score as cli
from tests.conftest import SHIPPED_BUNDLE

COUNT = 20
PART = 6


def run(source: Path, out: Path, *flags: str) -> None:
    command = [str(source), "--bundle", str(SHIPPED_BUNDLE), "--out", str(out), "--device", "cpu"]
    assert cli.main([*command, "--part-images", str(PART), "--format", "jsonl", *flags]) == 0


def rows_of(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("part-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def bytes_of(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


def write_hostile(folder: Path) -> None:
    """Write a good image, and beside it a pipe, a link to ``/dev/zero`` and a sparse file of 40 GB."""
    folder.mkdir()
    (folder / "good.png").write_bytes((SHIPPED_BUNDLE / "examples" / "clean.png").read_bytes())
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(40 << 30)
