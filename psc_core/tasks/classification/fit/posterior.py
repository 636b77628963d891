"""The prior's precision τ and the temperature T of a Gaussian posterior over logits.

Of a posterior ``f ~ N(μ, s²)`` over the logits of an image the head serves ``softmax(f / T)``: its logits have the mean
μ / T and the variance s² / T², and probabilities, mutual information and samples all belong to this one posterior.  In
the probit approximation

    ``probabilities = softmax((μ / T) / √(1 + π s² / (8 T²))) = softmax(μ / √(T² + π s² / 8))``

T cannot undo what s² flattens, so the validation NLL tells when a posterior is too wide, as Kronecker factors make it
where classes are separable.  It does not tell when one is too narrow: weights that are well calibrated alone gain
nothing from a posterior, and the NLL hardly changes up to τ = ∞, where epistemic uncertainty vanishes.  So the prior is
the one that the weights were fitted with, whose τ the validation NLL of the weights alone chose, or the least strong of
the stronger ones that costs at most :data:`COST`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional

TEMPERATURES: Final = (0.01, 100.0)
"""Range of T; logits that are right on every validation image would drive T to 0."""

PRIOR_IMAGES: Final = 1.0
"""Strength of the prior that T is 1: a of a Gamma prior on 1 / T with its mode at 1."""

STRONGER: Final = tuple(10.0 ** (k / 4) for k in range(29))
"""Values of τ to try, times that of the weights: up to 10⁷, four to a decade."""

COST: Final = (2e-3, 1e-4)
"""Maximum rise of the mean validation NLL for a wider posterior: a fraction of the least, or nats if that is more."""


class Choice(NamedTuple):
    """The chosen posterior."""

    prior_precision: float  # τ of its prior
    temperature: float  # T that the logits are divided by
    val_nll: float  # mean validation NLL with both, nats


def nll(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the negative log-likelihood of each label under ``softmax(logits)``, nats."""
    return functional.cross_entropy(logits, labels, reduction="none").double()


def tempered(
    mean: Float[Tensor, "n classes"], variance: Float[Tensor, " n #classes"], temperature: float
) -> Float[Tensor, "n classes"]:
    """Return the probit logits ``μ / √(T² + π s² / 8)``."""
    return mean * (temperature**2 + (math.pi / 8.0) * variance).rsqrt()


def choose_posterior(
    mean: Float[Tensor, "m classes"],
    variance_with: Callable[[float], Float[Tensor, " m #classes"]],
    labels: Int[Tensor, " m"],
    *,
    prior_precision: float,
) -> Choice:
    """Return the smallest of ``prior_precision`` × :data:`STRONGER`, each with its own T, that costs little NLL.

    Args:
        mean: μ of each validation example.
        variance_with: s² of each for a given τ, of all classes or of each.
        labels: Class index of each.
        prior_precision: τ that the weights were fitted with.
    """
    found = []
    for factor in STRONGER:
        variance = variance_with(factor * prior_precision)
        temperature = choose_temperature(mean, variance, labels)
        val_nll = nll(tempered(mean, variance, temperature), labels).mean().item()
        found.append(Choice(factor * prior_precision, temperature, val_nll))
    least = min(choice.val_nll for choice in found)
    limit = least + max(COST[0] * least, COST[1])
    return next(choice for choice in found if choice.val_nll <= limit)


def choose_temperature(
    mean: Float[Tensor, "m classes"], variance: Float[Tensor, " m #classes"], labels: Int[Tensor, " m"]
) -> float:
    """Return T of the least NLL plus prior within :data:`TEMPERATURES`, or 1.

    One that is not 1 has to gain log(m) / 2 nats over the m examples (Schwarz 1978): a smaller gain is within the error
    of the estimate.
    """

    def loss(log_temperature: float) -> float:
        prior = PRIOR_IMAGES * (math.exp(-log_temperature) - 1 + log_temperature)
        return nll(tempered(mean, variance, math.exp(log_temperature)), labels).sum().item() + prior

    limits = (math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1]))
    found = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-6})
    return math.exp(found.x) if found.fun + math.log(len(labels)) / 2 < loss(0.0) else 1.0
