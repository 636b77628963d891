"""The facts that a person wants to know about a classifier's bundle, beyond those about every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psc_core.tasks.classification.calibration import Calibration
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.classification.task import Classification

LOSS: Final = 0.01
"""The loss of accuracy, compared to the plain network's, above which a warning is given."""

DIGITS: Final = ".4f"
"""The format of a metric."""

RECORDED: Final[Mapping[str, str]] = {}
"""The metrics that are shown without images, with their names in the manifest: none."""


def limits_of(
    policy: ClassificationPolicy, calibration: Calibration, metrics: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return the limits of decisions by the figure that shows them; None if no image is beyond."""
    can_be_ambiguous = policy.can_be_ambiguous(calibration.num_classes)
    return {"entropies": policy.ambiguity_threshold if can_be_ambiguous else None}


def policy_lines(task: Classification, policy: ClassificationPolicy, limits: Mapping[str, float | None]) -> list[str]:
    """Return the meaning of the policy besides the alarm, one line each."""
    threshold = limits["entropies"]
    if policy.ambiguity_threshold < 0:
        return ["ambiguous: every other image"]
    return [f"ambiguous: {'none' if threshold is None else f'predictive entropy above {threshold:.4g} nats'}"]


def warnings_of(metrics: Mapping[str, Any], head: Mapping[str, float]) -> list[str]:
    """Return the warnings that follow from the metrics and the head's record in the manifest."""
    above, error = head.get("nll_above_own", 0.0), head.get("nll_above_own_error", 0.0)
    found = []
    if above > error:
        found.append(
            "the network's own probabilities are served, divided by a temperature: the NLL of the head's is "
            f"{above:.3f} ± {error:.3f} nats higher on validation images; --predictions psc serves the head's"
        )
    return found


def accuracy_lost(base: Mapping[str, float], psc: Mapping[str, float]) -> str:
    """Return how much less accurate predictions with PSC are than the plain network's; empty if it does not matter."""
    lost = base.get("accuracy", 0) - psc.get("accuracy", 0)
    return f"{lost:.3f}" if lost > LOSS else ""
