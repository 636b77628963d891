"""Calibrations that decide by a policy and one quantile."""

from dataclasses import dataclass
from typing import Any

import torch

from psc_core.answers import BasePolicy, ClassificationPolicy
from psc_core.tasks import classification, regression
from psc_core.tasks.base import BaseCalibration

IMAGES = 999


@dataclass(frozen=True)
class Decider:
    """A calibration of :data:`IMAGES` images under one policy; ``quantile`` holds at every coverage."""

    policy: BasePolicy
    quantile: float

    @property
    def calibration(self) -> BaseCalibration:
        """The calibration of the policy's task."""
        scores, quantiles = torch.arange(float(IMAGES)), torch.full((IMAGES,), self.quantile, dtype=torch.float64)
        if not isinstance(self.policy, ClassificationPolicy):
            return regression.Calibration(scores, quantiles)
        labels = torch.zeros(IMAGES, dtype=torch.int64)
        return classification.Calibration(scores, torch.zeros(IMAGES), torch.zeros(IMAGES), quantiles, labels, 3)

    def decide(self, outputs: Any) -> Any:
        """Return the decisions on n images."""
        return self.calibration.decide(outputs, self.policy)
