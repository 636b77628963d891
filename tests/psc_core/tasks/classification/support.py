"""Calibrations and prediction sets for the tests of calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from psc_core.tasks.classification.answer import SCORES
from psc_core.tasks.classification.calibration import Calibration
from psc_core.tasks.classification.decide import Thresholds
from psc_core.tasks.classification.fit.calibrate import fit_calibration
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.outputs import Outputs


def calibrate(n: int = 200, classes: int = 4) -> Calibration:
    random = torch.Generator().manual_seed(0)
    probabilities = torch.randn(n, classes, generator=random).mul(2).softmax(1)
    drawn = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    entropy = torch.special.entr(probabilities).sum(1)
    return fit_calibration(torch.randn(n, generator=random), entropy, probabilities, drawn)


def prediction_sets(threshold: float, probabilities: Tensor) -> Tensor:
    packed = torch.cat([torch.zeros(len(probabilities), len(SCORES)), probabilities], 1)
    policy = ClassificationPolicy(alpha=0.5, ambiguity_threshold=1.0, coverage=0.9)
    decisions = Thresholds(policy, 0.5, threshold).decide(Outputs(packed.numpy(), SCORES, ()))
    return torch.from_numpy(decisions.prediction_set)
