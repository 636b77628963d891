"""Facts that a person wants to know of a bundle of several labels, beyond what is said of every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psc_core.tasks.multilabel.calibration import Calibration
from psc_core.tasks.multilabel.policy import MultilabelPolicy
from psc_core.tasks.multilabel.task import Multilabel

DIGITS: Final = ".4f"
"""Format of a metric."""

RECORDED: Final[Mapping[str, str]] = {"accuracy": "accuracy", "exact": "exact"}
"""Metrics that are shown without images, and their names in the manifest."""


def limits_of(
    policy: MultilabelPolicy, calibration: Calibration, metrics: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return the limits of decisions by the figure that shows them: none."""
    return {}


def policy_lines(task: Multilabel, policy: MultilabelPolicy, limits: Mapping[str, float | None]) -> list[str]:
    """Return what the policy means for this bundle beside the alarm, a line each."""
    return [f"undecided: more than {policy.max_undecided} labels that may as well be the other way"]


def warnings_of(metrics: Mapping[str, Any], head: Mapping[str, float]) -> list[str]:
    """Return what a person is warned of, from the metrics in the manifest."""
    return []


def accuracy_lost(base: Mapping[str, float], psc: Mapping[str, float]) -> str:
    """Return by how much predictions with PSC are less accurate than the network's own: it is not asked."""
    return ""
