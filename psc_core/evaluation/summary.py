"""Say in plain sentences what the evaluation of a classifier found.

For OOD scores the same rule holds for and against PSC: a score *wins* over another if their AUROC differs by more than
:data:`STANDARD_ERRORS` standard errors of the paired difference, else they *tie*.  Classifiers are only ranked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.evaluation.base import PRIMARY, ObservedRate
from psc_core.evaluation.losses import QUALITIES
from psc_core.evaluation.selective import DECISION, Acceptance
from psc_core.evaluation.separation import FIELDS, Separation
from psc_core.metrics.ranking import Difference

STANDARD_ERRORS: Final = 2.0
"""Minimum difference, in standard errors, at which one score beats another."""

COMPARED: Final = ("accuracy", "nll", "ece")
"""The metrics by which classifiers are compared."""


def compare_scores(ood: str, scores: Mapping[str, Separation]) -> str:
    """Compare PSC with the other methods on one OOD set."""
    psc = scores[PRIMARY]
    others = [name for name in scores if not name.startswith(PRIMARY)]
    if not others:
        return f"{ood}: PSC reaches AUROC {psc.auroc:.4f}; no other method was run."
    best = max(others, key=lambda name: scores[name].auroc)
    better = [name for name in others if is_significant(scores[name].auroc_difference, sign=-1)]
    difference = scores[best].auroc_difference
    numbers = f"AUROC {psc.auroc:.4f} against {scores[best].auroc:.4f}, difference {signed(difference)}"
    if better:
        return f"{ood}: PSC loses to {', '.join(better)}; the best is {best} ({numbers})."
    if is_significant(difference):
        return f"{ood}: PSC wins; the next is {best} ({numbers})."
    return f"{ood}: PSC ties with {best} ({numbers})."


def better_fields(ood: str, scores: Mapping[str, Separation], id_name: str, alpha: float) -> list[str]:
    """Describe the other fields of an answer that beat the OOD score on one OOD set, and how to decide by them."""
    return [
        f"{ood}: the field {field} of the same answers would do better (AUROC {scores[name].auroc:.4f} against "
        f"{scores[PRIMARY].auroc:.4f}). To use it, nothing is fitted again: call an image out of distribution where "
        f"{field} > {scores[name].threshold:.6g}, which {alpha:g} of {id_name} exceed."
        for name, field in FIELDS.items()
        if name in scores and is_significant(scores[name].auroc_difference, sign=-1)
    ]


def describe_acceptance(ood: str, found: Mapping[str, Acceptance], id_name: str) -> str:
    """Say how much of one OOD set the service's two thresholds accept, and how much the best single threshold does."""
    single = {name: value.ood_accepted for name, value in found.items() if name != DECISION}
    best = min(single, key=lambda name: single[name])
    return (
        f"{ood}: the two thresholds accept {found[DECISION].ood_accepted:.1%} of it where they accept 95 % of "
        f"{id_name}; one threshold on {best} accepts {single[best]:.1%}."
    )


def is_significant(difference: Difference, *, sign: int = 1) -> bool:
    """Return whether a difference of this sign exceeds :data:`STANDARD_ERRORS` standard errors."""
    return sign * difference.value > STANDARD_ERRORS * difference.standard_error


def signed(difference: Difference) -> str:
    """Format a difference as ``+0.0100 ± 0.0010``."""
    return f"{difference.value:+.4f} ± {difference.standard_error:.4f}"


def compare_classifiers(classifiers: Mapping[str, Mapping[str, float]], metric: str) -> str:
    """Say which classifier is best by one metric."""
    values = {name: quality[metric] for name, quality in classifiers.items()}
    best = max(values.values()) if metric == "accuracy" else min(values.values())
    names = [name for name, value in values.items() if value == best]
    listed = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    return f"{QUALITIES[metric][0]}: best is {' and '.join(names)} ({listed})."


def describe_rate(what: str, rate: ObservedRate) -> str:
    """Describe an observed rate beside the nominal rate."""
    low, high = rate.calibrated_acceptance
    return (
        f"{what}: {rate.count} of {rate.images} ({rate.rate:.2%}), {rate.assessment} ({rate.nominal:.2%}; "
        f"{low}…{high} expected at {rate.level:.0%})."
    )


def describe_accepted(accepted: int, wrong: int, images: int) -> str:
    """Say how many in-distribution images nobody has to look at, and how many of these are wrong."""
    of_these = f", of which {wrong} are wrong ({wrong / accepted:.2%})" if accepted else ""
    return f"Accepted: {accepted} of {images} ({accepted / images:.2%}){of_these}."
