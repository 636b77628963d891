from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import runs
from benchmarks.paper import report
from benchmarks.paper.cifar10_uq import mean_and_error


def test_report_keeps_other_text_and_lists_missing_runs(tmp_path: Path) -> None:
    page = "# Measurements\n\n| memory | 3 GiB |\n\n<!-- begin ood -->\nold\n<!-- end ood -->\n\nThe end.\n"
    (tmp_path / "ood.md").write_text(page)
    report.main(["--results", str(tmp_path)])
    written = (tmp_path / "ood.md").read_text()
    assert "| memory | 3 GiB |" in written
    assert "The end." in written
    assert "old" not in written
    assert written.count("Not run:") == 1
    assert (tmp_path / "paper.md").read_text().count("Not run:") == len(report.SECTIONS) - len(report.PAGES)
    report.main(["--results", str(tmp_path)])
    assert (tmp_path / "ood.md").read_text() == written


def test_section_is_replaced_in_place(tmp_path: Path) -> None:
    file = tmp_path / "serving.md"
    runs.write_section(file, "load", "first", "Serving under load")
    file.write_text(file.read_text() + "\n## Other\n\ntext\n")
    runs.write_section(file, "load", "second", "Serving under load")
    expected = "## Serving under load\n\n<!-- begin load -->\nsecond\n<!-- end load -->"
    assert file.read_text() == f"# Serving\n\n{expected}\n\n## Other\n\ntext\n"


def test_smoke_results_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "sign_example-smoke.json").write_text("{}")
    assert "Not run" in report.section(tmp_path, "sign_example", "benchmarks.paper.sign_example")


def test_parts_are_computed_once(tmp_path: Path) -> None:
    args = runs.parser("").parse_args(["--scale", "smoke", "--data", "nowhere", "--out", str(tmp_path)])
    run = runs.start("test", args)
    calls: list[int] = []

    def compute() -> runs.Json:
        calls.append(1)
        return {"value": len(calls)}

    assert run.part("a", {"x": 1}, compute) == run.part("a", {"x": 1}, compute) == {"value": 1}
    assert run.part("a", {"x": 2}, compute) == {"value": 2}
    kept = json.loads((tmp_path / "parts" / "test-smoke-a.json").read_text())
    assert kept["settings"] == {"x": 2}


def test_provenance_names_every_part(tmp_path: Path) -> None:
    for seed, names in ((1, "ab"), (2, "bc")):
        words = ["--scale", "smoke", "--data", "nowhere", "--out", str(tmp_path), "--seed", str(seed)]
        run = runs.start("test", runs.parser("").parse_args(words))
        for name in names:
            run.part(name, {}, dict)
        record = run.write({}, runs.provenance)
    assert {name: origin["command"][-8:] for name, origin in record["origins"].items()} == {
        "a": "--seed 1",
        "b": "--seed 1",
        "c": "--seed 2",
    }
    _, _, first, second = (tmp_path / "test-smoke.md").read_text().splitlines()
    assert first.startswith("- a, b: `")
    assert second.startswith("- c: `")
    assert runs.where(record["origins"]["a"]["environment"]) in first


def test_command_line_omits_local_paths(tmp_path: Path) -> None:
    cli = runs.parser("")
    cli.add_argument("--seeds", type=int, nargs="+")
    cli.add_argument("--only", action="append")
    cli.add_argument("--checkpoint", type=Path)
    given = [
        "--scale",
        "cpu",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path),
        "--seeds",
        "1",
        "2",
        "--only",
        "a",
        "--only",
        "b",
        "--checkpoint",
        str(tmp_path / "net.safetensors"),
    ]
    command = runs.command_line(cli.parse_args(given)).split(" ", 1)[1]
    assert str(tmp_path) not in command
    assert command.endswith(
        "--scale cpu --data ROOT --seed 0 --seeds 1 2 --only a --only b --checkpoint net.safetensors"
    )


def test_mean_and_standard_error() -> None:
    assert mean_and_error([3.0]) == (3.0, None)
    mean, error = mean_and_error([1.0, 2.0, 3.0, 6.0])
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt(14 / 3) / 2)
