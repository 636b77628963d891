"""Outputs to decisions: interval, OOD flag and decision under a policy, as arrays over the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from psc_core.tasks.decide import BaseDecisions, BaseThresholds
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.regression.answer import DECISIONS
from psc_core.tasks.regression.policy import RegressionPolicy

FINITE: Final = (np.finfo(np.float32).min, np.finfo(np.float32).max)

ACCEPT, ABSTAIN_UNCERTAIN, ABSTAIN_OOD = range(len(DECISIONS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions(BaseDecisions):
    """The decisions of a regression on n images."""

    decision_names = DECISIONS

    lower: FloatArray  # (n,) ends of the interval, in the target's unit
    upper: FloatArray  # (n,)

    def columns(self, outputs: Outputs[FloatArray], classes: Sequence[str], **options: int) -> dict[str, Any]:
        first = dict.fromkeys(outputs.scores)  # The scores come before the interval; their values are the base's.
        return {**first, "lower": self.lower, "upper": self.upper, **super().columns(outputs, classes)}


@dataclass(frozen=True)
class Thresholds(BaseThresholds):
    """A regression's thresholds; ``quantile`` is half the width of an interval, in standard deviations."""

    policy: RegressionPolicy

    def decide(self, outputs: Outputs[FloatArray]) -> Decisions:
        """Return the decisions on n images; an interval is as wide as its float32 ends are apart."""
        with np.errstate(over="ignore"):  # Ends beyond every float32 are the last one: JSON has no infinity.
            mean, half = outputs["mean"], self.quantile * np.hypot(outputs["aleatoric"], outputs["epistemic"])
            lower, upper = (np.clip(end, *FINITE).astype(np.float32) for end in (mean - half, mean + half))
        is_ood = outputs["ood_p_value"] <= self.ood_p_value
        decision = np.full(len(outputs), ACCEPT, np.int8)
        if self.policy.max_width is not None:
            with np.errstate(over="ignore"):  # A limit may be beyond every float32.
                decision[~(upper - lower <= self.policy.max_width)] = ABSTAIN_UNCERTAIN  # Also where the width is NaN.
        decision[is_ood] = ABSTAIN_OOD
        return Decisions(is_ood=is_ood, decision=decision, lower=lower, upper=upper)
