"""Summary, tables and JSON of a report with known numbers."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from psc_core.evaluation.report import Classification, EvaluationReport, RealisedRate, Separation
from psc_core.evaluation.summary import summarise
from psc_core.evaluation.tables import Table, tables, to_json, to_markdown, to_text
from psc_core.metrics.intervals import CountInterval, RateInterval
from psc_core.metrics.ranking import Difference


def separation(auroc: float, difference: float, error: float) -> Separation:
    return Separation(auroc, aupr_in=0.9, aupr_out=0.8, fpr95=0.2, auroc_difference=Difference(difference, error))


def classification(nll: float) -> Classification:
    return Classification(0.96, nll, 0.05, 0.005, 0.006, 0.001, 0.002, 0.9, 1.0)


def rate(count: int) -> RealisedRate:
    return RealisedRate(0.05, count, 1000, 0.99, RateInterval(0.03, 0.07), CountInterval(33, 69), CountInterval(20, 80))


REPORT = EvaluationReport(
    model={"name": "digits", "version": "0123456789ab", "layer": "layer3.0"},
    id_name="mnist",
    images=1000,
    examples=1000,
    classification={"psc": classification(0.136), "base": classification(0.15), "temperature": classification(0.14)},
    ood_images={"fashion": 500, "near|far": 400, "hard": 300},
    separation={
        "fashion": {
            "psc": separation(0.99, 0, 0),
            "psc-entropy": separation(0.999, -0.009, 0.001),
            "knn": separation(0.97, 0.02, 0.002),
            "gda": separation(0.98, 0.01, 0.001),
        },
        "near|far": {"psc": separation(0.90, 0, 0), "knn": separation(0.905, -0.005, 0.004)},
        "hard": {
            "psc": separation(0.80, 0, 0),
            "knn": separation(0.9, -0.1, 0.01),
            "gda": separation(0.85, -0.05, 0.01),
            "energy": separation(0.7, 0.1, 0.01),
        },
    },
    flagged={"fashion": 0.93, "near|far": 0.5, "hard": 0.4},
    false_alarms=rate(50),
    misses=rate(95),
    mean_set_size=1.07,
    ambiguity={"psc": 0.97, "base": 0.96},
)


def test_wins_ties_and_losses() -> None:
    wins, tie, loses, *rest = summarise(REPORT)
    assert wins == "fashion: PSC wins; the next is gda (AUROC 0.9900 against 0.9800, difference +0.0100 ± 0.0010)."
    assert tie.startswith("near|far: PSC ties with knn (AUROC 0.9000 against 0.9050")
    assert loses.startswith("hard: PSC loses to knn, gda; the best is knn")
    assert "NLL: best is psc (psc 0.1360, base 0.1500, temperature 0.1400)." in rest
    assert "Accuracy: best is psc and base and temperature" in rest[0]
    assert rest[-2] == "False alarms: 50 of 1000 (5.00%), as promised (5.00%; 20…80 expected at 99%)."
    assert "higher than promised" in rest[-1]


def test_psc_alone() -> None:
    alone = dataclasses.replace(
        REPORT, separation={"fashion": {"psc": separation(0.99, 0, 0)}}, classification={"psc": classification(0.1)}
    )
    first, *rest = summarise(alone)
    assert first == "fashion: PSC reaches AUROC 0.9900; no other method was run."
    assert len(rest) == 2


def test_unknown_standard_error_is_a_tie() -> None:
    tiny = {"psc": separation(0.5, 0, math.inf), "knn": separation(1.0, -0.5, math.inf)}
    report = dataclasses.replace(REPORT, separation={"one": tiny})
    assert summarise(report)[0].startswith("one: PSC ties with knn")
    assert json.loads(json.dumps(to_json(report), allow_nan=False))["separation"]["one"]["knn"]["auroc_difference"] == {
        "value": -0.5,
        "standard_error": None,
    }


def test_json_holds_every_number_and_the_summary() -> None:
    data = json.loads(json.dumps(to_json(REPORT), allow_nan=False))
    assert data["classification"]["psc"]["nll"] == 0.136
    assert data["separation"]["hard"]["gda"]["auroc_difference"] == {"value": -0.05, "standard_error": 0.01}
    assert data["false_alarms"]["calibrated_acceptance"] == [20, 80]
    assert data["false_alarms"]["rate"] == 0.05 and data["misses"]["assessment"] == "higher than promised"
    assert data["summary"] == summarise(REPORT)


def test_tables_rank_scores() -> None:
    quality, fashion, *_, promises, ambiguity = tables(REPORT)
    assert [row[0] for row in quality.rows] == ["psc", "base", "temperature"]
    assert [row[0] for row in fashion.rows] == ["psc-entropy", "psc", "gda", "knn"]
    assert fashion.rows[1][-1] == "" and fashion.rows[3][-1] == "+0.0200 ± 0.0020"
    assert promises.rows[0][:5] == ["false alarms (p ≤ 0.05)", "0.0500", "0.0500", "0.0300…0.0700", "50"]
    assert promises.rows[-1][:3] == ["mean prediction set", "", "1.070"]
    assert ambiguity.rows == [["psc", "0.9700"], ["base", "0.9600"]]
    for table in tables(REPORT):
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_text_aligns_columns() -> None:
    text = Table("T", ["name", "x"], [["a", "1.0"], ["longer", "12.0"]]).to_text()
    assert text == "T\nname       x\n────────────\na        1.0\nlonger  12.0"


def test_pages_hold_title_summary_and_tables() -> None:
    text, page = to_text(REPORT), to_markdown(REPORT)
    assert text.startswith("digits 0123456789ab (layer layer3.0) on mnist: 1000 images\n")
    assert page.startswith("# digits 0123456789ab")
    assert "- fashion: PSC wins" in page and "| psc | 0.9600 | 0.1360 |" in page
    assert "## near|far: 400 OOD images" in page
    several = dataclasses.replace(REPORT, examples=1500)
    assert "1000 images, 1500 labels" in to_text(several)


@pytest.mark.parametrize(
    ("count", "assessment"),
    [(19, "lower than promised"), (20, "as promised"), (80, "as promised"), (81, "higher than promised")],
)
def test_assessment_at_the_edges(count: int, assessment: str) -> None:
    assert rate(count).assessment == assessment
