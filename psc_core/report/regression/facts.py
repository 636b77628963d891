"""The facts that a person wants to know about a regression's bundle, beyond those about every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psc_core.tasks.regression.calibration import Calibration
from psc_core.tasks.regression.policy import RegressionPolicy
from psc_core.tasks.regression.task import Regression

LOSS: Final = 0.05
"""The relative rise of the RMSE, compared to the plain network's, above which a warning is given."""

DIGITS: Final = ".4g"
"""The format of a metric."""

RECORDED: Final[Mapping[str, str]] = {"rmse": "rmse", "r2": "r2", "nll": "nll_nats", "crps": "crps"}
"""The metrics that are shown without images, with their names in the manifest."""


def limits_of(
    policy: RegressionPolicy, calibration: Calibration, metrics: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return the limits of decisions by the figure that shows them; None if no image is beyond."""
    width = policy.max_width
    return {"deviations": None if width is None else width / 2 / calibration.quantile(policy.coverage)}


def policy_lines(task: Regression, policy: RegressionPolicy, limits: Mapping[str, float | None]) -> list[str]:
    """Return the meaning of the policy besides the alarm, one line each."""
    widest = "" if policy.max_width is None else f"{policy.max_width:g} {task.target.unit}".rstrip()
    return [
        f"intervals contain the true number of at least {policy.coverage:.1%} of images like the calibration images",
        f"uncertain: an interval wider than {widest}" if widest else "no interval is too wide",
    ]


def warnings_of(metrics: Mapping[str, Any], head: Mapping[str, float]) -> list[str]:
    """Return the warnings that follow from the metrics in the manifest: none."""
    return []


def accuracy_lost(base: Mapping[str, float], psc: Mapping[str, float]) -> str:
    """Return how much less accurate predictions with PSC are than the plain network's; empty if it does not matter."""
    grown = psc["rmse"] / base["rmse"] - 1 if base.get("rmse") else 0
    return f"{grown:.0%} of its RMSE" if grown > LOSS else ""
