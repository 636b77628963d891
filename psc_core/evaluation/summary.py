"""An evaluation in plain sentences.

OOD scores, by one rule for PSC and against it: a score *wins* over another when their AUROC differs by more than
:data:`STANDARD_ERRORS` standard errors of the paired difference, else they *tie*.  Classifiers are only ranked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.evaluation.losses import METRICS
from psc_core.evaluation.report import DECISION, FIELDS, PRIMARY, EvaluationReport, ObservedRate, Separation
from psc_core.metrics.ranking import Difference

STANDARD_ERRORS: Final = 2.0
"""Difference, in standard errors, from which on one score beats another."""

COMPARED: Final = ("accuracy", "nll", "ece")
"""Metrics by which classifiers are compared."""


def summarise(report: EvaluationReport) -> list[str]:
    """Which score wins on each OOD set, which classifier is best, and whether nominal rates hold."""
    sentences = [compare_scores(name, scores) for name, scores in report.separation.items()]
    sentences += [text for name, scores in report.separation.items() for text in better_fields(name, scores, report)]
    sentences += [describe_acceptance(name, report) for name in report.acceptance]
    if len(report.classification) > 1:
        sentences += [compare_classifiers(report.classification, metric) for metric in COMPARED]
    return [
        *sentences,
        describe_rate("False alarms", report.false_alarms),
        describe_rate("Labels outside the prediction set", report.misses),
    ]


def compare_scores(ood: str, scores: Mapping[str, Separation]) -> str:
    """PSC against the other methods on one OOD set."""
    own = scores[PRIMARY]
    others = [name for name in scores if not name.startswith(PRIMARY)]
    if not others:
        return f"{ood}: PSC reaches AUROC {own.auroc:.4f}; no other method was run."
    best = max(others, key=lambda name: scores[name].auroc)
    better = [name for name in others if is_significant(scores[name].auroc_difference, sign=-1)]
    difference = scores[best].auroc_difference
    numbers = f"AUROC {own.auroc:.4f} against {scores[best].auroc:.4f}, difference {signed(difference)}"
    if better:
        return f"{ood}: PSC loses to {', '.join(better)}; the best is {best} ({numbers})."
    if is_significant(difference):
        return f"{ood}: PSC wins; the next is {best} ({numbers})."
    return f"{ood}: PSC ties with {best} ({numbers})."


def better_fields(ood: str, scores: Mapping[str, Separation], report: EvaluationReport) -> list[str]:
    """What else every answer holds that beats the OOD score on one OOD set, and how to decide by it."""
    return [
        f"{ood}: the field {field} of the same answers would do better (AUROC {scores[name].auroc:.4f} against "
        f"{scores[PRIMARY].auroc:.4f}). To use it, nothing is fitted again: call an image out of distribution where "
        f"{field} > {scores[name].threshold:.6g}, which {report.false_alarms.promised:g} of {report.id_name} exceed."
        for name, field in FIELDS.items()
        if name in scores and is_significant(scores[name].auroc_difference, sign=-1)
    ]


def describe_acceptance(ood: str, report: EvaluationReport) -> str:
    """How much of one OOD set is accepted by the service's two thresholds and by the best single one."""
    found = report.acceptance[ood]
    single = {name: value.ood_accepted for name, value in found.items() if name != DECISION}
    best = min(single, key=lambda name: single[name])
    return (
        f"{ood}: {found[DECISION].ood_accepted:.1%} is accepted where both thresholds accept 95 % of {report.id_name}, "
        f"{single[best]:.1%} with one threshold on {best}."
    )


def is_significant(difference: Difference, *, sign: int = 1) -> bool:
    """Whether a difference of this sign is more than :data:`STANDARD_ERRORS` standard errors."""
    return sign * difference.value > STANDARD_ERRORS * difference.standard_error


def signed(difference: Difference) -> str:
    """``+0.0100 ± 0.0010``."""
    return f"{difference.value:+.4f} ± {difference.standard_error:.4f}"


def compare_classifiers(classifiers: Mapping[str, Mapping[str, float]], metric: str) -> str:
    """The best of several classifiers by one metric."""
    values = {name: quality[metric] for name, quality in classifiers.items()}
    best = max(values.values()) if metric == "accuracy" else min(values.values())
    names = [name for name, value in values.items() if value == best]
    listed = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    return f"{METRICS[metric][0]}: best is {' and '.join(names)} ({listed})."


def describe_rate(what: str, rate: ObservedRate) -> str:
    """An observed rate beside the nominal one."""
    low, high = rate.calibrated_acceptance
    return (
        f"{what}: {rate.count} of {rate.images} ({rate.rate:.2%}), {rate.assessment} ({rate.promised:.2%}; "
        f"{low}…{high} expected at {rate.level:.0%})."
    )
