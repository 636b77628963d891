"""Choose a posterior by validation NLL: the precision of its prior, and a temperature for the mean logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.heads.fit.temperature import fit_temperature

NLL_TOLERANCE: Final = 0.001
"""Relative increase of the validation NLL that a wider posterior may cost."""

PRIOR_IMAGES: Final = 1.0
"""Strength of the prior that a head's temperature is 1, see :func:`.temperature.fit_temperature`."""


def nll(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Negative log-likelihood of each label under ``softmax(logits)``, nats."""
    return functional.cross_entropy(logits, labels, reduction="none").double()


class Choice(NamedTuple):
    """The chosen posterior."""

    precision: float  # τ of its prior
    temperature: float  # T that the mean logits are divided by
    val_nll: float  # mean validation NLL with both, nats


def choose_posterior(
    logits_with: Callable[[float], Float[Tensor, "m classes"]],
    labels: Int[Tensor, " m"],
    precisions: Sequence[float],
) -> Choice:
    """The widest posterior whose validation NLL is as good as the best, with its temperature.

    That is the smallest τ whose mean validation NLL is at most 0.1 % above the minimum, each τ with a temperature of 1
    or its best one.  The plain minimum over τ is often at infinity: weights that are well calibrated alone gain
    nothing from a posterior, the NLL hardly depends on τ, and epistemic uncertainty would vanish for noise.
    The temperature undoes the flattening by the posterior and by the weights' own prior that all images have in common;
    it divides the mean of the logits, so their variance, and with it the epistemic uncertainty, stays.  A temperature
    other than 1 has to gain log(m) / 2 nats over the m validation examples (Schwarz 1978): a smaller gain is within
    the error of the estimate.

    Args:
        logits_with: Validation logits for a given precision, the posterior's variance included.
        labels: Class index of each validation example.
        precisions: Candidates for τ.
    """
    price = math.log(len(labels)) / (2 * len(labels))
    costs: dict[Choice, float] = {}
    temperature = 1.0
    for precision in sorted(precisions, reverse=True):
        logits = logits_with(precision)
        temperature = fit_temperature(logits, labels, prior_images=PRIOR_IMAGES, start=temperature)
        for tried, penalty in ((temperature, price), (1.0, 0.0)):
            choice = Choice(precision, tried, nll(logits / tried, labels).mean().item())
            costs[choice] = choice.val_nll + penalty
    limit = (1 + NLL_TOLERANCE) * min(costs.values())
    return min((choice for choice in costs if costs[choice] <= limit), key=lambda one: (one.precision, costs[one]))
