"""Fit the temperature of the network's logits, and choose between their softmax and a head."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.metrics import label_nll
from psc_core.tasks.classification.fit.posterior import choose_temperature, nll
from psc_core.tasks.classification.heads.base import ClassifierHead
from psc_core.tasks.classification.heads.temperature import TemperatureHead


def fit_temperature_head(logits: Float[Tensor, "m classes"], labels: Int[Tensor, " m"]) -> TemperatureHead:
    """Fit the temperature by validation NLL, see :func:`.posterior.choose_temperature`."""
    temperature = choose_temperature(logits, logits.new_zeros(len(logits), 1), labels)
    record = {"temperature": temperature, "val_nll": float(nll(logits / temperature, labels).mean())}
    return TemperatureHead({"temperature": logits.new_tensor(temperature)}, record=record)


def retempered(
    head: TemperatureHead, probabilities: Float[Tensor, "m classes"], labels: Int[Tensor, " m"]
) -> TemperatureHead:
    """Return the head with a temperature refitted to its probabilities for m other examples, or itself.

    What the record says of how the head was chosen stays.
    Log-probabilities serve as logits: they differ by a constant of each example, which cancels in the softmax.
    """
    temperature = head.temperature.cpu()
    fitted = fit_temperature_head(probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log(), labels)
    factor = float(fitted.temperature)
    if factor == 1:
        return head
    record = {**head.record, **fitted.record, "temperature": float(temperature) * factor}
    return TemperatureHead({"temperature": temperature * factor}, record=record)


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
