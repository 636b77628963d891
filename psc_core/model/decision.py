"""Outputs to decisions: class or interval, OOD flag and decision under a policy, as arrays over the images.

Library, ``psc-eval`` and service all decide here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psc_core.calibration.conformal import Thresholds
from psc_core.calibration.intervals import ValueThresholds
from psc_core.model.outputs import FloatArray, Outputs
from psc_core.prediction import DECISIONS

ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(len(DECISIONS))

ABSTAIN_UNCERTAIN = ABSTAIN_AMBIGUOUS
"""Of a regression, at the position that the same idea has for a classifier."""


class Decisions(NamedTuple):
    """What is decided for n images."""

    class_index: npt.NDArray[np.int64]  # (n,) the most probable class
    confidence: FloatArray  # (n,) its probability
    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :data:`psc_core.prediction.DECISIONS`
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


class ValueDecisions(NamedTuple):
    """What is decided for n images of a regression."""

    lower: FloatArray  # (n,) ends of the interval, in the target's unit
    upper: FloatArray  # (n,)
    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :data:`psc_core.value_prediction.VALUE_DECISIONS`


AnyThresholds = Thresholds | ValueThresholds
AnyDecisions = Decisions | ValueDecisions
"""Of either kind of model."""


def decide_either(outputs: Outputs[FloatArray], thresholds: AnyThresholds) -> AnyDecisions:
    """Apply the thresholds of either kind."""
    if isinstance(thresholds, ValueThresholds):
        return decide_values(outputs, thresholds)
    return decide(outputs, thresholds)


def decide_values(outputs: Outputs[FloatArray], thresholds: ValueThresholds) -> ValueDecisions:
    """Apply thresholds to the outputs of n images of a regression."""
    mean, half = outputs["mean"], thresholds.deviations * np.hypot(outputs["aleatoric"], outputs["epistemic"])
    lower, upper = (mean - half).astype(np.float32), (mean + half).astype(np.float32)
    is_ood = outputs["ood_p_value"] <= thresholds.ood_p_value
    decision = np.full(len(outputs), ACCEPT, np.int8)
    if thresholds.policy.max_width is not None:
        decision[2 * half > thresholds.policy.max_width] = ABSTAIN_UNCERTAIN
    decision[is_ood] = ABSTAIN_OOD
    return ValueDecisions(lower, upper, is_ood, decision)
