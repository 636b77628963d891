"""Packed rows → verdicts: class, decision and prediction set under a policy, as arrays over the images.

A row is one image's packed ``Outputs``.  Library, ``psc-eval`` and service all decide here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from psc_core.model.pipeline import EPISTEMIC, LOG_DENSITY, OOD_P_VALUE, OOD_SCORE, PREDICTIVE_ENTROPY, SCORES

FloatArray = npt.NDArray[np.float32]
Rows = FloatArray

ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(3)
DECISIONS: Final = ("accept", "abstain_ambiguous", "abstain_ood")
"""Names of the decision codes in :class:`Verdict`."""


class Verdict(NamedTuple):
    """What is said of n images; every array has n first.

    Attributes:
        probabilities: (n, K); this and the next five are the pipeline's ``Outputs``.
        predictive_entropy: Nats.
        log_density: log p(z), nats.
        ood_p_value: Share of calibration images at least as unusual.
        epistemic: In the head's unit.
        ood_score: What the p-value ranks, nats.
        class_index: int64, the most probable class.
        confidence: Its probability.
        is_ood: bool, p ≤ alpha.
        decision: int8 code, an index into :data:`DECISIONS`.
        prediction_set: bool (n, K), the classes in the set.
    """

    probabilities: FloatArray
    predictive_entropy: FloatArray
    log_density: FloatArray
    ood_p_value: FloatArray
    epistemic: FloatArray
    ood_score: FloatArray
    class_index: npt.NDArray[np.int64]
    confidence: FloatArray
    is_ood: npt.NDArray[np.bool_]
    decision: npt.NDArray[np.int8]
    prediction_set: npt.NDArray[np.bool_]


def judge(
    rows: Rows,
    set_thresholds: FloatArray,
    *,
    alpha: float | FloatArray,
    ambiguity_threshold: float | FloatArray,
) -> Verdict:
    """Apply thresholds to rows.

    Args:
        rows: (n, SCORES + K).
        set_thresholds: (K,) the smallest probability with which a class is in the prediction set; the most probable
            class always is (``Calibration.set_thresholds``).
        alpha: See :func:`decide`.
        ambiguity_threshold: See :func:`decide`.
    """
    probabilities = rows[:, SCORES:]
    images, class_index = np.arange(len(rows)), probabilities.argmax(axis=1)
    prediction_set = probabilities >= set_thresholds
    prediction_set[images, class_index] = True
    is_ood, decision = decide(rows, alpha, ambiguity_threshold)
    return Verdict(
        probabilities=probabilities,
        predictive_entropy=rows[:, PREDICTIVE_ENTROPY],
        log_density=rows[:, LOG_DENSITY],
        ood_p_value=rows[:, OOD_P_VALUE],
        epistemic=rows[:, EPISTEMIC],
        ood_score=rows[:, OOD_SCORE],
        class_index=class_index,
        confidence=probabilities[images, class_index],
        is_ood=is_ood,
        decision=decision,
        prediction_set=prediction_set,
    )


def decide(
    rows: Rows, alpha: float | FloatArray, ambiguity_threshold: float | FloatArray
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int8]]:
    """``is_ood`` and ``decision`` (see :class:`Verdict`).

    Args:
        rows: (n, SCORES + K).
        alpha: An image is out of distribution when its p-value is at most this; one value, or one for each image.
        ambiguity_threshold: Else it is ambiguous when its predictive entropy (nats) is above this; likewise.
    """
    with np.errstate(over="ignore"):  # A threshold may be beyond every float32.
        is_ood = rows[:, OOD_P_VALUE] <= alpha
        decision = (rows[:, PREDICTIVE_ENTROPY] > ambiguity_threshold).astype(np.int8)
    decision[is_ood] = ABSTAIN_OOD
    return is_ood, decision
