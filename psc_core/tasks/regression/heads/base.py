"""The base of a regression's heads."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.head import Head, Scored
from psc_core.tasks.regression.answer import SCORES


class HeadOutput(NamedTuple):
    """Predictions of a batch, all in the target's unit."""

    mean: Float[Tensor, " batch"]
    aleatoric: Float[Tensor, " batch"]  # standard deviation of the noise
    epistemic: Float[Tensor, " batch"]  # standard deviation that more training data would remove


class RegressionHead(Head):
    """Base of the heads of a regression; subclasses add their ``layout``."""

    score_names = SCORES

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Return mean and standard deviations of a batch of feature vectors."""
        raise NotImplementedError

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        mean, aleatoric, epistemic = self(features)
        served = mean if output is None else output[:, 0]
        return Scored({"mean": served, "aleatoric": aleatoric, "epistemic": epistemic}, mean.new_empty(len(mean), 0))
