"""``docs/architecture.md``: the two walks name what is really called, each function once, in order of first calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import median

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


def test_sizes_of_what_is_written_by_hand() -> None:
    table = PAGE.split("## Written by hand")[1].split("## Before and after")[0]
    rows = re.findall(r"^\| (`.+?) \| ([\d,]+) \|", table, re.MULTILINE)
    assert len(rows) > 15
    for names, lines in rows:
        paths = [ROOT / name.replace(".", "/") for name in re.findall(r"`([\w.]+)`", names)]
        files = [file for path in paths for file in ([*path.rglob("*.py")] or [path.with_suffix(".py")])]
        counted = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert counted == pytest.approx(int(lines.replace(",", "")), rel=0.1), names


def test_numbers_of_before_and_after() -> None:
    table = PAGE.split("## Before and after")[1]
    now = [
        int(cells.replace(",", ""))
        for cells in re.findall(r"^\| [^|]+ \| [\d,]+ \| [\d,]+ \| ([\d,]+) \|$", table, re.MULTILINE)
    ]
    lines = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for package in ("app", "psc_core")
        for path in (ROOT / package).rglob("*.py")
    }
    code = {path: count for path, count in lines.items() if count > 1}
    words = PAGE.split("## Glossary")[1].split("\n## ")[0].count("\n| ") - 2
    packages = len({path.parent for path in code})
    assert now == pytest.approx([len(code), packages, sum(code.values()), median(code.values()), words], rel=0.1)
