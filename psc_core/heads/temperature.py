"""The softmax of the network's logits divided by a temperature T (Guo et al. 2017, equation 9).

There is no posterior, so epistemic uncertainty is 0.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.errors import NetworkError
from psc_core.heads.base import ClassifierHead, ClassifierOutput, Scored, scored
from psc_core.heads.softmax import choose_temperature, nll
from psc_core.metrics import label_nll


class TemperatureHead(ClassifierHead):
    """The softmax above; it reads the network's output instead of features."""

    kind = "own"  # the network's own softmax, in the bundle format
    reads_output = True
    has_temperature = True
    layout: ClassVar = {"temperature": ()}
    temperature: Tensor

    def forward(self, z: Float[Tensor, "batch classes"]) -> ClassifierOutput:
        logits = z / self.temperature
        return ClassifierOutput(logits.softmax(1), logits.new_zeros(len(logits)), -logits.logsumexp(1))

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        if output is None:
            raise NetworkError("the original network's predictions need a backbone that keeps the network's output")
        return scored(*self(output))

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        return {}

    def refit_temperature(
        self, probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]
    ) -> TemperatureHead:
        """Return the head with a temperature refitted to its probabilities for n other examples, or itself.

        What the record says of how the head was chosen stays.
        Log-probabilities serve as logits: they differ by a constant of each example, which cancels in the softmax.
        """
        temperature = self.temperature.cpu()
        fitted = fit_temperature_head(probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log(), labels)
        factor = float(fitted.temperature)
        if factor == 1:
            return self
        record = {**self.record, **fitted.record, "temperature": float(temperature) * factor}
        return TemperatureHead({"temperature": temperature * factor}, record=record)


def fit_temperature_head(logits: Float[Tensor, "m classes"], labels: Int[Tensor, " m"]) -> TemperatureHead:
    """Fit the temperature by validation NLL, see :func:`.softmax.choose_temperature`."""
    temperature = choose_temperature(logits, logits.new_zeros(len(logits), 1), labels)
    record = {"temperature": temperature, "val_nll": float(nll(logits / temperature, labels).mean())}
    return TemperatureHead({"temperature": logits.new_tensor(temperature)}, record=record)


def better_of(
    head: ClassifierHead,
    tempered: TemperatureHead,
    z: Float[Tensor, "m dim"],
    logits: Float[Tensor, "m classes"],
    labels: Int[Tensor, " m"],
) -> ClassifierHead:
    """Return the head, unless its NLL on the selection split is higher by more than one paired standard error.

    The record of the returned head has the difference and its error, nats.  A probability of zero, or
    NaN, costs 87.3 nats (:data:`psc_core.metrics.LOG_FLOOR`).
    """
    of_head = label_nll(head(z).probabilities.nan_to_num(nan=0.0), labels)
    difference = of_head - nll(logits / tempered.temperature.to(logits.device), labels)
    mean, error = float(difference.mean()), float(difference.std(correction=0)) / math.sqrt(len(difference))
    chosen: ClassifierHead = tempered if mean > error else head
    return chosen.recording({"nll_above_own": mean, "nll_above_own_error": error})
