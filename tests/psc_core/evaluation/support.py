"""A report with known numbers."""

from __future__ import annotations

from psc_core.evaluation.classification import QUALITIES, Acceptance, ClassificationReport, Separation
from psc_core.evaluation.evaluate import ObservedRate
from psc_core.metrics import CountInterval, Difference, RateInterval


def separation(auroc: float, difference: float, error: float) -> Separation:
    return Separation(auroc, 0.9, 0.8, 0.2, Difference(difference, error), threshold=1.25)


def classification(nll: float) -> dict[str, float]:
    values = (0.96, nll, 0.05, 0.005, 0.006, 0.001, 0.002, 0.9, 1.0)
    return dict(zip(QUALITIES, values, strict=True))


def rate(count: int) -> ObservedRate:
    return ObservedRate(0.05, count, 1000, 0.99, RateInterval(0.03, 0.07), CountInterval(33, 69), CountInterval(20, 80))


REPORT = ClassificationReport(
    model={"name": "digits", "version": "0123456789ab", "layer": "layer3.0"},
    id_name="mnist",
    images=1000,
    examples=1000,
    classification={
        "psc": classification(0.136),
        "original": classification(0.15),
        "temperature": classification(0.14),
    },
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
    acceptance={
        name: {"psc-decision": Acceptance(0.02, 0.3), "psc": Acceptance(0.04, 0.35), "knn": Acceptance(0.03, 0.36)}
        for name in ("fashion", "near|far", "hard")
    },
    flagged={"fashion": 0.93, "near|far": 0.5, "hard": 0.4},
    false_alarms=rate(50),
    misses=rate(95),
    accepted=800,
    accepted_wrong=16,
    mean_set_size=1.07,
    ambiguity={"psc": 0.97, "original": 0.96},
)
