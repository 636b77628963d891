"""The interface of every head (the paper's g′): z in, class probabilities or a number, and their uncertainty, out.

All heads work on standardised features, ``φ = (z − center) · inverse_scale`` (:mod:`psc_core.heads.fit.data`).

Shapes: B images, K classes, D = dim of z.  Entropies are in nats.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.fitted import Fitted


class HeadOutput(NamedTuple):
    """Predictions of a batch."""

    probabilities: Float[Tensor, "batch classes"]  # of each class; they sum to 1
    epistemic: Float[Tensor, " batch"]  # what more training data would remove, in the head's own epistemic_unit


class UncertaintyDecomposition(NamedTuple):
    """The two parts of the predictive uncertainty."""

    aleatoric: Float[Tensor, " batch"]  # ambiguity of the image itself, nats
    epistemic: Float[Tensor, " batch"]  # as in HeadOutput


class ValueOutput(NamedTuple):
    """Predictions of a batch for a regression, all in the target's unit."""

    mean: Float[Tensor, " batch"]
    aleatoric: Float[Tensor, " batch"]  # standard deviation of the noise
    epistemic: Float[Tensor, " batch"]  # standard deviation that more training data would remove


class StandardisedHead(Fitted):
    """Base of all heads: they read standardised features."""

    center: Tensor
    inverse_scale: Tensor

    def standardise(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """φ, the standardised features."""
        return (z - self.center) * self.inverse_scale


class ValueHead(StandardisedHead):
    """Base of the heads of a regression; subclasses add their ``layout``."""

    reads_layers: ClassVar[bool] = False
    """Whether it reads features of earlier layers, averaged over positions, beside z."""

    def forward(self, z: Float[Tensor, "batch dim"]) -> ValueOutput:
        """Mean and standard deviations of a batch of feature vectors."""
        raise NotImplementedError

    def explain(self, z: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        """What it can say of how it came to its mean, images first; nothing by default."""
        return {}


class Head(StandardisedHead):
    """Base of the heads of a classifier; subclasses add their ``layout`` and :attr:`epistemic_unit`."""

    epistemic_unit: ClassVar[str]
    """Unit of the epistemic uncertainty, for people."""

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Probabilities and epistemic uncertainty of a batch of feature vectors."""
        raise NotImplementedError

    def decompose(self, z: Float[Tensor, "batch dim"]) -> UncertaintyDecomposition:
        """Aleatoric (here the entropy of the probabilities) and epistemic uncertainty of a batch of feature vectors."""
        probabilities, epistemic = self(z)
        return UncertaintyDecomposition(entropy(probabilities), epistemic)


def entropy(probabilities: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch"]:
    """``−Σ_k p_k log p_k`` in nats, 0 log 0 = 0."""
    return cast(Tensor, torch.special.entr(probabilities)).sum(dim=-1)
