from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from psc_core.collapse.candidate import LayerCollapse
from psc_core.collapse.report import CollapseReport
from psc_core.errors import UsageError


def report(*numbers: tuple[str, int, float, float], pattern: str | None = None, output: bool = True) -> CollapseReport:
    """Layers of (name, channels, NC1, NC4); the last two are penultimate and output."""
    roles = ["hidden"] * (len(numbers) - 2) + ["penultimate", "output"]
    if not output:
        roles = ["hidden"] * (len(numbers) - 1) + ["penultimate"]
    layers = tuple(
        LayerCollapse(name, index, "map", (channels, 4), (2, 2), role, nc1, nc4)
        for index, ((name, channels, nc1, nc4), role) in enumerate(zip(numbers, roles, strict=True))
    )
    return CollapseReport(layers, 0.2, "operations", pattern, 100, 50)


def test_caller_can_name_layer() -> None:
    table = report(("a", 4, 0.9, 0.5), ("bb", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9))
    chosen = table.candidate("p")
    assert chosen.layers == ("p",) and "named by the caller" in chosen.reason
    assert table.nc4_of(chosen) == 0.99
    with pytest.raises(UsageError, match="measured layers, got 'b'; some are"):
        table.candidate("b")


def test_table_marks_candidate_and_explains() -> None:
    measured = replace(
        report(("a", 4, 0.9, 0.5), ("layer1.conv", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9)),
        notes=("only one training image of 'x'",),
    )
    lines = measured.table().splitlines()
    assert lines[0].split() == ["#", "layer", "kind", "channels×spatial", "NC1", "NC4"]
    assert lines[2].split() == ["1", "layer1.conv", "map", "4×4", "0.6000", "0.8000", "◀", "candidate"]
    assert lines[3].endswith("penultimate") and lines[4].endswith("output")
    assert lines[5].startswith("candidate: layer1.conv") and lines[6].startswith("penultimate: p")
    assert lines[7] == "note: only one training image of 'x'"
    assert lines[1].index("0.9000") == lines[2].index("0.6000")
    named = measured.table(measured.candidate("p")).splitlines()
    assert named[3].endswith("◀ candidate  penultimate") and not any(line.startswith("penultimate:") for line in named)


def test_json_and_csv_round_trip() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    assert CollapseReport.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    lines = list(csv.DictReader(measured.to_csv().splitlines()))
    assert lines[1] == {
        "index": "1",
        "layer": "p",
        "kind": "map",
        "channels": "8",
        "spatial": "4",
        "role": "penultimate",
        "nc1": "0.1",
        "nc4": "0.99",
    }
