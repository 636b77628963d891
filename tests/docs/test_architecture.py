"""``docs/architecture.md``: the two walks name what is really called, each function once, in order of first calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TinyJob

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk(heading: str) -> list[str]:
    """Functions of a walk's table; a class stands for its ``__call__``."""
    found = re.search(rf"^## One {heading} .*?\| --- \| --- \|$(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    names = re.findall(r"`([\w.]+)`", found[1])
    assert len(names) == len(set(names)) > 20
    return [f"{name}.__call__" if name.rsplit(".", 1)[1][0].isupper() else name for name in names]


def called(*arguments: str) -> list[str]:
    """What :mod:`tests.docs.calls` records."""
    command = [sys.executable, "-m", "tests.docs.calls", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split("calls:\n")[1].splitlines()


def test_walk_of_a_request() -> None:
    names = walk("image")
    assert [name for name in called("predict") if name in names] == names


def test_walk_of_a_fit(tiny_job: TinyJob, tmp_path: Path) -> None:
    names = walk("training image")
    assert [name for name in called("fit", *tiny_job.args, "--out", str(tmp_path / "b")) if name in names] == names


@pytest.mark.parametrize("package", ["app", "psc_core"])
def test_floors_name_every_package(package: str) -> None:
    (table,) = re.findall(rf"^\| floor of `{package}` .*?(?=^$)", PAGE, re.MULTILINE | re.DOTALL)
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    below = {
        path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert named == below - {"__init__"}


def test_what_is_written_by_hand_exists() -> None:
    names = re.findall(r"`((?:app|psc_core)[\w.]*)`", PAGE.split("## Written by hand")[1])
    assert len(names) > 20
    paths = [ROOT / name.replace(".", "/") for name in names]
    assert [str(path) for path in paths if not path.is_dir() and not path.with_suffix(".py").is_file()] == []
