"""Outputs to decisions: labels, OOD flag and decision under a policy, as arrays over the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from psc_core.tasks.decide import BaseDecisions, BaseThresholds
from psc_core.tasks.multilabel.answer import DECISIONS
from psc_core.tasks.multilabel.policy import MultilabelPolicy
from psc_core.tasks.outputs import FloatArray, Outputs

ACCEPT, ABSTAIN_UNDECIDED, ABSTAIN_OOD = range(len(DECISIONS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions(BaseDecisions):
    """The decisions of a model of several labels on n images."""

    decision_names = DECISIONS

    holds: npt.NDArray[np.bool_]  # (n, K) labels of at least even odds
    undecided: npt.NDArray[np.bool_]  # (n, K) labels of which both values are possible
    most_probable: npt.NDArray[np.int64]  # (n,) label

    def columns(self, outputs: Outputs[FloatArray], classes: Sequence[str], **options: int) -> dict[str, Any]:
        return {
            "labels": _named(self.holds, classes),
            "undecided": _named(self.undecided, classes),
            "probabilities": np.ascontiguousarray(outputs.probabilities),
            **super().columns(outputs, classes),
        }


def _named(chosen: npt.NDArray[np.bool_], classes: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(classes[k] for k in row.nonzero()[0].tolist()) for row in chosen]


@dataclass(frozen=True)
class Thresholds(BaseThresholds):
    """The thresholds of several labels; ``quantile`` is the smallest probability of a possible value of a label."""

    policy: MultilabelPolicy

    def decide(self, outputs: Outputs[FloatArray]) -> Decisions:
        """Return the decisions on n images."""
        probabilities = outputs.probabilities
        undecided = np.minimum(probabilities, 1 - probabilities) >= self.quantile
        is_ood = outputs["ood_p_value"] <= self.ood_p_value
        decision = np.full(len(outputs), ACCEPT, np.int8)
        decision[undecided.sum(axis=1) > self.policy.max_undecided] = ABSTAIN_UNDECIDED
        decision[is_ood] = ABSTAIN_OOD
        return Decisions(
            is_ood=is_ood,
            decision=decision,
            holds=probabilities >= 0.5,
            undecided=undecided,
            most_probable=probabilities.argmax(axis=1),
        )
