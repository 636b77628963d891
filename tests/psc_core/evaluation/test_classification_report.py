"""The report of a classifier as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json

from psc_core.evaluation.classification import Table
from tests.psc_core.evaluation.support import REPORT


def test_json_holds_every_number_and_the_summary() -> None:
    data = json.loads(json.dumps(REPORT.to_json(), allow_nan=False))
    assert data["classification"]["psc"]["nll"] == 0.136
    assert data["separation"]["hard"]["gda"]["auroc_difference"] == {"value": -0.05, "standard_error": 0.01}
    assert data["false_alarms"]["calibrated_acceptance"] == [20, 80]
    assert data["false_alarms"]["rate"] == 0.05 and data["misses"]["assessment"] == "higher than stated"
    assert data["summary"] == REPORT.summary()


def test_tables_rank_scores() -> None:
    quality, fashion, accepted, *_, rates, ambiguity = REPORT.tables()
    assert [row[0] for row in quality.rows] == ["psc", "original", "temperature"]
    assert [row[0] for row in fashion.rows] == ["psc-entropy", "psc", "gda", "knn"]
    assert accepted.title == "fashion: accepted beside 95 % of mnist"
    assert accepted.rows == [
        ["psc-decision", "0.0200", "0.3000"], ["knn", "0.0300", "0.3600"], ["psc", "0.0400", "0.3500"],
    ]  # fmt: skip
    assert fashion.rows[1][-1] == "" and fashion.rows[3][-1] == "+0.0200 ± 0.0020"
    assert rates.rows[0][:5] == ["false alarms (p ≤ 0.05)", "0.0500", "0.0500", "0.0300…0.0700", "50"]
    assert rates.rows[-1][:3] == ["mean prediction set", "", "1.070"]
    assert ambiguity.rows == [["psc", "0.9700"], ["original", "0.9600"]]
    for table in REPORT.tables():
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_text_aligns_columns() -> None:
    text = Table("T", ["name", "x"], [["a", "1.0"], ["longer", "12.0"]]).to_text()
    assert text == "T\nname       x\n────────────\na        1.0\nlonger  12.0"


def test_pages_hold_title_summary_and_tables() -> None:
    text, page = REPORT.to_text(), REPORT.to_markdown()
    assert text.startswith("digits 0123456789ab (layer3.0) on mnist: 1000 images\n")
    assert page.startswith("# digits 0123456789ab")
    assert "- fashion: PSC wins" in page and "| psc | 0.9600 | 0.1360 |" in page
    assert "## near|far: 400 OOD images" in page
    several = dataclasses.replace(REPORT, examples=1500)
    assert "1000 images, 1500 labels" in several.to_text()
