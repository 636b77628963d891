"""Parts are computed once and say where they come from; sections are replaced in their pages."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest

from benchmarks import report, runs
from tests.conftest import ROOT


def started(folder: Path, *more: str) -> runs.Run:
    return runs.start(
        "test", runs.parser("").parse_args(["--scale", "smoke", "--data", "/x", "--out", str(folder), *more])
    )


def test_section_is_replaced_in_place() -> None:
    page = report.updated("# Serving\n", "load", "first") + "\n## Other\n\ntext\n"
    assert page.startswith("# Serving\n\n## load\n\n<!-- begin load -->\nfirst\n")
    assert report.updated(page, "load", "second") == page.replace("first", "second")


def test_smoke_results_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "ood-smoke.json").write_text("{}")
    assert report.section(tmp_path, "ood") is None


def test_parts_are_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> runs.Json:
        calls.append(1)
        return {"value": len(calls)}

    run = started(tmp_path)
    assert run.part("a", {"x": 1}, compute) == run.part("a", {"x": 1}, compute) == {"value": 1}
    assert run.part("a", {"x": 2}, compute) == {"value": 2}
    assert started(tmp_path, "--fit-images", "9").part("a", {"x": 2}, compute) == {"value": 3}
    kept = json.loads((tmp_path / "parts" / "test-smoke-a.json").read_text())
    assert kept["settings"] == {"x": 2, "epochs": None, "fit_images": 9, "test_images": None}


def test_parts_of_a_record_are_taken_and_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        run = started(tmp_path)
        run.part("a", {"x": value}, lambda: {"value": value})  # noqa: B023
        run.part("b", {}, dict)
        assert runs.results(run.write(runs.provenance)) == {"a": {"value": value}, "b": {}}
        shutil.rmtree(tmp_path / "parts")
    assert started(tmp_path).part("a", {"x": 2}, pytest.fail) == {"value": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["test-smoke.json"]


def test_provenance_names_every_part(tmp_path: Path) -> None:
    for seed, names in (("1", "ab"), ("2", "bc")):
        run = started(tmp_path, "--seed", seed)
        for name in names:
            run.part(name, {}, dict)
    record = run.write(runs.provenance)
    _, _, first, second = runs.provenance(record).splitlines()
    assert first.startswith("- a, b: `") and "--seed 1" in first
    assert second.startswith("- c: `") and "--seed 2" in second
    assert runs.where(record["parts"]["a"]["environment"]) in first


def test_command_line_omits_local_paths_and_can_be_parsed(tmp_path: Path) -> None:
    cli = runs.parser("")
    cli.add_argument("--seeds", type=int, nargs="+")
    cli.add_argument("--only", action="extend", nargs="+")
    cli.add_argument("--flag", action="store_true")
    words = ["--scale", "cpu", "--data", str(tmp_path), "--out", str(tmp_path), "--seeds", "1", "2", "--flag"]
    command = runs.command_line(cli.parse_args([*words, "--only", "a b", "--only", "c"])).split(" ", 1)[1]
    assert command.endswith("--scale cpu --data ROOT --seed 0 --seeds 1 2 --only 'a b' c --flag")


def test_mean_and_standard_error() -> None:
    assert runs.plus_minus([3.0], 1) == "3.0"
    assert runs.plus_minus([1.0, 2.0, 3.0, 6.0], 1) == "3.0 ± 1.1"
    assert runs.standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx(math.sqrt(14 / 3) / 2)


PAGES = [ROOT / "README.md", *ROOT.glob("a*/README.md"), *(ROOT / "docs").glob("*.md"), *runs.RESULTS.glob("*.md")]


def published() -> set[str]:
    """Commands of the pages, without those of paragraphs that name the commit that has the script."""
    paragraphs = [part for page in PAGES for part in page.read_text().split("\n\n") if "of commit" not in part]
    found = re.findall(r"python -m (benchmarks\.[^`#\n]*)", "\n".join(paragraphs))
    return {command.strip().replace("\\", "") for command in found}


def test_published_commands_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        """Instead of a run."""

    def stop(self: argparse.ArgumentParser, argv: list[str]) -> None:
        parse(self, argv)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    commands = published()
    assert len(commands) > 30
    for command in commands - {"benchmarks.train"}:
        module, *words = shlex.split(command)
        with pytest.raises(Parsed):
            importlib.import_module(module).main(words)
