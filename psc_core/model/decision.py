"""Outputs to decisions: class, OOD flag, decision and prediction set under a policy, as arrays over the images.

Library, ``psc-eval`` and service all decide here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psc_core.model.outputs import FloatArray, Outputs
from psc_core.policy import Policy
from psc_core.prediction import DECISIONS

ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(len(DECISIONS))


class Decisions(NamedTuple):
    """What is decided for n images."""

    class_index: npt.NDArray[np.int64]  # (n,) the most probable class
    confidence: FloatArray  # (n,) its probability
    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :data:`psc_core.prediction.DECISIONS`
    prediction_set: npt.NDArray[np.bool_]  # (n, K) the classes in the set


def decide(outputs: Outputs[FloatArray], set_thresholds: FloatArray, policy: Policy) -> Decisions:
    """Apply a policy to the outputs of n images.

    ``set_thresholds`` (K,) are the smallest probabilities with which a class is in the prediction set
    (``Calibration.set_thresholds`` at the policy's coverage); the most probable class always is.
    """
    probabilities = outputs.probabilities
    images, class_index = np.arange(len(outputs)), probabilities.argmax(axis=1)
    prediction_set = probabilities >= set_thresholds
    prediction_set[images, class_index] = True
    with np.errstate(over="ignore"):  # A threshold may be beyond every float32.
        is_ood = outputs["ood_p_value"] <= policy.alpha
        ambiguous = outputs["predictive_entropy"] > policy.ambiguity_threshold
    decision = np.full(len(outputs), ACCEPT, np.int8)
    decision[ambiguous] = ABSTAIN_AMBIGUOUS
    decision[is_ood] = ABSTAIN_OOD
    return Decisions(class_index, probabilities[images, class_index], is_ood, decision, prediction_set)
