from __future__ import annotations

import csv

from psc_core.collapse.tables import to_csv, to_text
from tests.psc_core.collapse.test_report import report


def test_table_marks_candidate_and_explains() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("layer1.conv", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9))
    lines = to_text(measured, measured.candidate()).splitlines()
    assert lines[0].split() == ["#", "layer", "kind", "channels×spatial", "NC1", "NC4"]
    assert lines[2].split() == ["1", "layer1.conv", "map", "4×4", "0.6000", "0.8000", "◀", "candidate"]
    assert lines[3].endswith("penultimate") and lines[4].endswith("output")
    assert lines[5].startswith("candidate: layer1.conv") and lines[6].startswith("penultimate: p")
    assert len(lines) == 7
    assert lines[1].index("0.9000") == lines[2].index("0.6000")
    named = to_text(measured, measured.candidate("p")).splitlines()
    assert named[3].endswith("◀ candidate  penultimate") and not any(line.startswith("penultimate:") for line in named)


def test_csv() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    lines = list(csv.DictReader(to_csv(measured).splitlines()))
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
