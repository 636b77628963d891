"""Calibrations and prediction sets for the tests of calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from psc_core.answers import CLASSIFICATION_SCORES, ClassificationPolicy
from psc_core.tasks.base import Outputs
from psc_core.tasks.classification import Calibration, Thresholds, fit_calibration


def calibrate(n: int = 200, classes: int = 4) -> Calibration:
    random = torch.Generator().manual_seed(0)
    probabilities = torch.randn(n, classes, generator=random).mul(2).softmax(1)
    drawn = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    entropy = torch.special.entr(probabilities).sum(1)
    return fit_calibration(torch.randn(n, generator=random), entropy, probabilities, drawn)


def prediction_sets(threshold: float, probabilities: Tensor) -> Tensor:
    packed = torch.cat([torch.zeros(len(probabilities), len(CLASSIFICATION_SCORES)), probabilities], 1)
    policy = ClassificationPolicy(alpha=0.5, ambiguity_threshold=1.0, coverage=0.9)
    decisions = Thresholds(policy, 0.5, threshold).decide(Outputs(packed.numpy(), CLASSIFICATION_SCORES, ()))
    return torch.from_numpy(decisions.prediction_set)
