"""The predictions that :meth:`psc_core.PSCRegressor.predict` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.target import Target
from psc_core.tasks.prediction import BasePrediction
from psc_core.tasks.regression.answer import ValuePrediction
from psc_core.tasks.regression.decide import Decisions


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(BasePrediction):
    """Predictions of a regression for n images, on the CPU.

    Every score of :class:`.answer.ValuePrediction` is an attribute, ``float32 (n,)``, as ``mean``.
    """

    answer = ValuePrediction

    decisions: Decisions
    target: Target

    @property
    def lower(self) -> Tensor:
        """``float32 (n,)`` lower end of the interval that contains the true number with the bundle's coverage."""
        return torch.from_numpy(self.decisions.lower)

    @property
    def upper(self) -> Tensor:
        """``float32 (n,)`` upper end of the interval."""
        return torch.from_numpy(self.decisions.upper)

    @property
    def interval(self) -> Tensor:
        """``float32 (n, 2)`` both ends of the interval."""
        return torch.stack([self.lower, self.upper], dim=1)
