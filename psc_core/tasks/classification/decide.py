"""Outputs to decisions: class, OOD flag, prediction set and decision under a policy, as arrays over the images."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psc_core.tasks.classification.answer import DECISIONS
from psc_core.tasks.classification.calibration import Thresholds
from psc_core.tasks.outputs import FloatArray, Outputs

ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(len(DECISIONS))


class Decisions(NamedTuple):
    """The decisions on n images."""

    class_index: npt.NDArray[np.int64]  # (n,) the most probable class
    confidence: FloatArray  # (n,) its probability
    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :data:`.answer.DECISIONS`
    prediction_set: npt.NDArray[np.bool_]  # (n, K) the classes in the set


def decide(outputs: Outputs[FloatArray], thresholds: Thresholds) -> Decisions:
    """Apply thresholds to the outputs of n images; the most probable class is always in the prediction set."""
    probabilities = outputs.probabilities
    images, class_index = np.arange(len(outputs)), probabilities.argmax(axis=1)
    prediction_set = probabilities >= thresholds.label_probability
    prediction_set[images, class_index] = True
    with np.errstate(over="ignore"):  # A threshold may be beyond every float32.
        is_ood = outputs["ood_p_value"] <= thresholds.ood_p_value
        ambiguous = outputs["predictive_entropy"] > thresholds.policy.ambiguity_threshold
    decision = np.full(len(outputs), ACCEPT, np.int8)
    decision[ambiguous] = ABSTAIN_AMBIGUOUS
    decision[is_ood] = ABSTAIN_OOD
    return Decisions(class_index, probabilities[images, class_index], is_ood, decision, prediction_set)
