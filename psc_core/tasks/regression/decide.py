"""Outputs to decisions: interval, OOD flag and decision under a policy, as arrays over the images."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.regression.answer import DECISIONS
from psc_core.tasks.regression.calibration import Thresholds

ACCEPT, ABSTAIN_UNCERTAIN, ABSTAIN_OOD = range(len(DECISIONS))


class Decisions(NamedTuple):
    """The decisions on n images."""

    lower: FloatArray  # (n,) ends of the interval, in the target's unit
    upper: FloatArray  # (n,)
    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :data:`.answer.DECISIONS`


def decide(outputs: Outputs[FloatArray], thresholds: Thresholds) -> Decisions:
    """Apply thresholds to the outputs of n images; an interval is as wide as its float32 ends are apart."""
    mean, half = outputs["mean"], thresholds.deviations * np.hypot(outputs["aleatoric"], outputs["epistemic"])
    lower, upper = (mean - half).astype(np.float32), (mean + half).astype(np.float32)
    is_ood = outputs["ood_p_value"] <= thresholds.ood_p_value
    decision = np.full(len(outputs), ACCEPT, np.int8)
    if thresholds.policy.max_width is not None:
        decision[upper - lower > thresholds.policy.max_width] = ABSTAIN_UNCERTAIN
    decision[is_ood] = ABSTAIN_OOD
    return Decisions(lower, upper, is_ood, decision)
