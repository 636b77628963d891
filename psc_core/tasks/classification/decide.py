"""Outputs to decisions: class, OOD flag, prediction set and decision under a policy, as arrays over the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from psc_core.tasks.classification.answer import DECISIONS
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.decide import BaseDecisions, BaseThresholds
from psc_core.tasks.outputs import FloatArray, Outputs

ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(len(DECISIONS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions(BaseDecisions):
    """The decisions of a classifier on n images."""

    decision_names = DECISIONS

    class_index: npt.NDArray[np.int64]  # (n,) the most probable class
    confidence: FloatArray  # (n,) its probability
    prediction_set: npt.NDArray[np.bool_]  # (n, K) the classes in the set

    def labels(self, classes: Sequence[str]) -> list[str]:
        return list(map(classes.__getitem__, self.class_index.tolist()))

    def columns(
        self, outputs: Outputs[FloatArray], classes: Sequence[str], *, top_k: int | None = None, **options: int
    ) -> dict[str, Any]:
        """Return the fields of the answers, with the ``top_k`` most probable classes if that is given."""
        probabilities = np.ascontiguousarray(outputs.probabilities)
        return {
            "label": self.labels(classes),
            "class_index": self.class_index,
            "confidence": self.confidence,
            **(
                {"probabilities": probabilities}
                if top_k is None
                else {"top": [_most_probable(row, classes, top_k) for row in probabilities]}
            ),
            **super().columns(outputs, classes),
            "prediction_set": [
                tuple(map(classes.__getitem__, members.nonzero()[0].tolist())) for members in self.prediction_set
            ],
        }


def _most_probable(probabilities: FloatArray, classes: Sequence[str], count: int) -> list[dict[str, Any]]:
    best = np.argsort(-probabilities, kind="stable")[:count].tolist()
    return [{"label": classes[k], "probability": probabilities[k]} for k in best]


@dataclass(frozen=True)
class Thresholds(BaseThresholds):
    """A classifier's thresholds; ``quantile`` is the smallest probability with which a class is in a prediction set."""

    policy: ClassificationPolicy

    def decide(self, outputs: Outputs[FloatArray]) -> Decisions:
        """Return the decisions on n images; the most probable class is always in the prediction set."""
        probabilities = outputs.probabilities
        images, class_index = np.arange(len(outputs)), probabilities.argmax(axis=1)
        prediction_set = probabilities >= self.quantile
        prediction_set[images, class_index] = True
        with np.errstate(over="ignore"):  # A threshold may be beyond every float32.
            is_ood = outputs["ood_p_value"] <= self.ood_p_value
            is_clear = outputs["predictive_entropy"] <= self.policy.ambiguity_threshold  # NaN is not.
        decision = np.where(is_clear, np.int8(ACCEPT), np.int8(ABSTAIN_AMBIGUOUS))
        decision[is_ood] = ABSTAIN_OOD
        return Decisions(
            is_ood=is_ood,
            decision=decision,
            class_index=class_index,
            confidence=probabilities[images, class_index],
            prediction_set=prediction_set,
        )
