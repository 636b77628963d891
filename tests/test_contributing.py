"""The recipes of ``CONTRIBUTING.md``, each followed in a copy of the sources by adding a small example.

The files that the example changes are exactly the files that the page lists.  The copy's own tests of every density or
head then take the new one in, and it is used end to end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT, TinyJob
from tests.toys import density, head, network_family, output_field

COPIED: Final = ("psc_core", "app", "docs", "tests")
LEFT_OUT: Final = shutil.ignore_patterns("data", "attacks", "browser", "deploy", "benchmarks")

Edits = Mapping[str, Sequence[tuple[str, str]]]
"""Path → (text that occurs once, its replacement); an empty text: a new file."""


def listed_files(heading: str, name: str) -> set[str]:
    """The files of a recipe's table; ``NAME`` stands for the name of what is added."""
    sections = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(heading + "\n")]
    return {file.replace("NAME", name) for file in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def apply(edits: Edits, folder: Path) -> set[str]:
    """Edit the files below ``folder``; the paths of those that changed."""
    before = contents(folder)
    for path, replacements in edits.items():
        text = (folder / path).read_text() if replacements[0][0] else ""
        for old, new in replacements:
            assert not old or text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
            text = text.replace(old, new) if old else new
        (folder / path).write_text(text)
    after = contents(folder)
    return {path for path in after if after[path] != before.get(path)}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=LEFT_OUT if name == "tests" else None)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(program: str, folder: Path, *arguments: str) -> None:
    """Run a Python program with the packages in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_adding_a_density(copy: Path, tiny_job: TinyJob) -> None:
    assert apply(density.EDITS, copy) == listed_files("Adding a density", "spherical")
    run(density.PROGRAM, copy, json.dumps(tiny_job.args))


def test_adding_a_head(copy: Path, tiny_job: TinyJob) -> None:
    assert apply(head.EDITS, copy) == listed_files("Adding a head", "centroid")
    run(head.PROGRAM, copy, json.dumps(tiny_job.args))


def test_adding_a_network_family(copy: Path, tiny_job: TinyJob) -> None:
    assert apply(network_family.EDITS, copy) == listed_files("Adding a network family", "tiny")
    run(network_family.PROGRAM, copy, json.dumps(tiny_job.args))


def test_adding_an_output_field(copy: Path, shipped_bundle: Path) -> None:
    assert apply(output_field.EDITS, copy) == listed_files("Adding an output field", "max_probability_gap")
    run(output_field.PROGRAM, copy, str(shipped_bundle))
