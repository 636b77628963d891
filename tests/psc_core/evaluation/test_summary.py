"""An evaluation in sentences."""

from __future__ import annotations

import dataclasses
import json
import math

from tests.psc_core.evaluation.support import REPORT, classification, separation


def test_wins_ties_and_losses() -> None:
    wins, tie, loses, better, *rest = REPORT.summary()
    assert wins == "fashion: PSC wins; the next is gda (AUROC 0.9900 against 0.9800, difference +0.0100 ± 0.0010)."
    assert tie.startswith("near|far: PSC ties with knn (AUROC 0.9000 against 0.9050")
    assert loses.startswith("hard: PSC loses to knn, gda; the best is knn")
    assert better == (
        "fashion: the field predictive_entropy of the same answers would do better (AUROC 0.9990 against 0.9900). To "
        "use it, nothing is fitted again: call an image out of distribution where predictive_entropy > 1.25, which "
        "0.05 of mnist exceed."
    )
    assert "NLL: best is psc (psc 0.1360, base 0.1500, temperature 0.1400)." in rest
    accepts = "the two thresholds accept 2.0% of it where they accept 95 % of mnist; one threshold on knn accepts 3.0%."
    assert rest[:3] == [f"{name}: {accepts}" for name in ("fashion", "near|far", "hard")]
    assert "Accuracy: best is psc and base and temperature" in rest[3]
    assert rest[-3] == "False alarms: 50 of 1000 (5.00%), as stated (5.00%; 20…80 expected at 99%)."
    assert "higher than stated" in rest[-2]


def test_psc_alone() -> None:
    alone = dataclasses.replace(
        REPORT,
        separation={"fashion": {"psc": separation(0.99, 0, 0)}},
        acceptance={},
        classification={"psc": classification(0.1)},
    )
    first, *rest = alone.summary()
    assert first == "fashion: PSC reaches AUROC 0.9900; no other method was run."
    assert len(rest) == 3


def test_unknown_standard_error_is_a_tie() -> None:
    tiny = {"psc": separation(0.5, 0, math.inf), "knn": separation(1.0, -0.5, math.inf)}
    report = dataclasses.replace(REPORT, separation={"one": tiny})
    assert report.summary()[0].startswith("one: PSC ties with knn")
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["separation"]["one"]["knn"][
        "auroc_difference"
    ] == {
        "value": -0.5,
        "standard_error": None,
    }


def test_accepted_images_and_the_errors_among_them() -> None:
    assert REPORT.summary()[-1] == "Accepted: 800 of 1000 (80.00%), of which 16 are wrong (2.00%)."
    none = dataclasses.replace(REPORT, accepted=0, accepted_wrong=0)
    assert none.summary()[-1] == "Accepted: 0 of 1000 (0.00%)."
