"""The predictions that :meth:`psc_core.PSCRegressor.predict` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.target import Target
from psc_core.tasks.prediction import BasePrediction
from psc_core.tasks.regression.answer import RegressionAnswer
from psc_core.tasks.regression.decide import Decisions


@dataclass(frozen=True, repr=False, eq=False)
class RegressionPrediction(BasePrediction):
    """Predictions of a regression for n images, on the CPU.

    Every score of :class:`.answer.RegressionAnswer` is an attribute, ``float32 (n,)``, as ``mean``.

    Example:
        >>> from psc_core.tasks.outputs import Outputs
        >>> from psc_core.tasks.regression.answer import SCORES
        >>> from psc_core.tasks.regression.decide import Thresholds
        >>> from psc_core.tasks.regression.policy import RegressionPolicy
        >>> policy = RegressionPolicy(alpha=0.05, max_width=None, coverage=0.95)
        >>> packed = torch.tensor([[50.0, 3.0, 4.0, -9.0, 9.0, 0.5], [20.0, 0.0, 1.0, -99.0, 99.0, 0.01]])
        >>> decisions = Thresholds(policy, 0.05, 2.0).decide(Outputs(packed.numpy(), SCORES, ()))
        >>> target = Target(name="age", unit="years")
        >>> prediction = RegressionPrediction(Outputs(packed, SCORES, ()), decisions, ("low", "high"), target)
        >>> prediction.mean, prediction.interval, prediction.decision
        (tensor([50., 20.]), tensor([[40., 60.],
                [18., 22.]]), ('accept', 'abstain_ood'))
    """

    answer = RegressionAnswer

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
