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

from psc_core.tasks import TASKS
from tests.conftest import ROOT, TinyJob
from tests.toys import density, head, network_family, output_field, task

COPIED: Final = ("psc_core", "app", "docs", "tests")
LEFT_OUT: Final = shutil.ignore_patterns("data", "attacks", "browser", "deploy", "benchmarks")

Edits = Mapping[str, Sequence[tuple[str, str]]]
"""Path → (text that occurs once, its replacement); an empty text: a new file."""


def listed_files(heading: str, **placeholders: str) -> set[str]:
    """The files of a recipe's table; ``NAME`` and ``TASK`` stand for what is added, and to which task."""
    sections = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(heading + "\n")]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    for placeholder, value in placeholders.items():
        files = [file.replace(placeholder, value) for file in files]
    return set(files)


def test_files_named_in_the_text_exist() -> None:
    named = set(
        re.findall(
            r"`((?:psc_core|app|docs|tests|benchmarks|examples)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text()
        )
    )
    made = {path for path in named if {"TASK", "NAME", "test_NAME"} & {*re.split(r"[/.]", path)}}
    assert len(named - made) > 25 and not [path for path in sorted(named - made) if not (ROOT / path).exists()]


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
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
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


@pytest.fixture(scope="session")
def jobs(tiny_job: TinyJob, angle_job: TinyJob) -> dict[str, tuple[str, ...]]:
    """Arguments of a quick ``psc-fit`` run for each task."""
    return {"classification": tiny_job.args, "regression": angle_job.args}


@pytest.fixture(scope="session")
def bundles(tiny_bundle: Path, angle_bundle: Path) -> dict[str, str]:
    """A bundle of each task."""
    return {"classification": str(tiny_bundle), "regression": str(angle_bundle)}


def test_has_a_bundle_of_each_task(jobs: Mapping[str, Sequence[str]], bundles: Mapping[str, str]) -> None:
    assert {*jobs} == {*bundles} == {*head.NAMES} == {*output_field.NAMES} == {*TASKS}


def test_adding_a_density(copy: Path, jobs: Mapping[str, Sequence[str]]) -> None:
    assert apply(density.EDITS, copy) == listed_files("Adding a density")
    run(density.PROGRAM, copy, json.dumps(jobs))


@pytest.mark.parametrize("of", TASKS)
def test_adding_a_head(copy: Path, jobs: Mapping[str, Sequence[str]], of: str) -> None:
    kind = head.NAMES[of]
    assert apply(head.EDITS[of], copy) == listed_files("Adding a head", NAME=kind, TASK=of)
    run(head.PROGRAM, copy, of, kind, json.dumps(jobs[of]))


def test_adding_a_network_family(copy: Path, jobs: Mapping[str, Sequence[str]]) -> None:
    assert apply(network_family.EDITS, copy) == listed_files("Adding a network family")
    run(network_family.PROGRAM, copy, json.dumps(jobs))


@pytest.mark.parametrize("of", TASKS)
def test_adding_an_output_field(copy: Path, bundles: Mapping[str, str], of: str) -> None:
    """Its own task gives it everywhere, models of the other are served as before."""
    assert apply(output_field.EDITS[of], copy) == listed_files("Adding an output field", TASK=of)
    run(output_field.PROGRAM, copy, output_field.NAMES[of], of, json.dumps(bundles))


def test_adding_a_task(copy: Path, bundles: Mapping[str, str], data_root: Path, tmp_path: Path) -> None:
    """A folder on each floor that has one for a task, and a line in ``TASKS``."""
    assert apply(task.EDITS, copy) == listed_files("Adding a task", NAME=task.NAME)
    run(task.PROGRAM, copy, str(tmp_path), str(data_root), json.dumps(bundles))
