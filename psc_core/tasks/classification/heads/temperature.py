"""The softmax of the network's logits divided by a temperature T (Guo et al. 2017, equation 9), for base predictions.

There is no posterior, so epistemic uncertainty is 0.
"""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from psc_core.errors import NetworkError
from psc_core.tasks.classification.heads.base import ClassifierHead, HeadOutput, scored
from psc_core.tasks.head import Scored


class TemperatureHead(ClassifierHead):
    """The softmax above; it reads the network's output instead of features."""

    kind = "own"  # the network's own softmax, in the bundle format
    reads_output = True
    layout: ClassVar = {"temperature": ()}
    temperature: Tensor

    def forward(self, z: Float[Tensor, "batch classes"]) -> HeadOutput:
        """Return probabilities from the network's logits."""
        logits = z / self.temperature
        return HeadOutput(logits.softmax(1), logits.new_zeros(len(logits)), -logits.logsumexp(1))

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        if output is None:
            raise NetworkError("base predictions need a backbone that keeps the network's output")
        return scored(*self(output))

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        return {}
