"""The figures of a report of several labels alone; the others are :mod:`psc_core.report.figures`."""

from __future__ import annotations

from psc_core.report.facts import Facts
from psc_core.report.figures import Figures, scores


def draw(facts: Facts) -> Figures:
    """Draw the figures of this task."""
    return {"entropies": scores(facts.content.sets, "entropy", "entropy of the least certain label, nats", None)}
