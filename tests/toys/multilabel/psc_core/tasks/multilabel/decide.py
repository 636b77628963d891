"""Outputs to decisions: labels, OOD flag and decision under a policy, as arrays over the images."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psc_core.tasks.multilabel.answer import DECISIONS
from psc_core.tasks.multilabel.calibration import Thresholds
from psc_core.tasks.outputs import FloatArray, Outputs

ACCEPT, ABSTAIN_UNDECIDED, ABSTAIN_OOD = range(len(DECISIONS))


class Decisions(NamedTuple):
    """What is decided for n images."""

    holds: npt.NDArray[np.bool_]  # (n, K) labels of at least even odds
    undecided: npt.NDArray[np.bool_]  # (n, K) labels of which both values are possible
    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :data:`.answer.DECISIONS`
    most_probable: npt.NDArray[np.int64]  # (n,) label


def decide(outputs: Outputs[FloatArray], thresholds: Thresholds) -> Decisions:
    """Apply thresholds to the outputs of n images."""
    probabilities = outputs.probabilities
    undecided = np.minimum(probabilities, 1 - probabilities) >= thresholds.possible
    is_ood = outputs["ood_p_value"] <= thresholds.ood_p_value
    decision = np.full(len(outputs), ACCEPT, np.int8)
    decision[undecided.sum(axis=1) > thresholds.policy.max_undecided] = ABSTAIN_UNDECIDED
    decision[is_ood] = ABSTAIN_OOD
    return Decisions(probabilities >= 0.5, undecided, is_ood, decision, probabilities.argmax(axis=1))
