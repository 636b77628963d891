"""What every head (the paper's g′) is: z in, class probabilities and epistemic uncertainty out.

All heads work on ``φ = (z − center) · inverse_scale``: unit variance per column, measured on the training
rows, so that priors and length-scales mean the same whatever the units of z.  A column that is constant in
training is divided by the largest deviation of any column: it teaches nothing, and moving it later counts
as moving an ordinary column.

Shapes: B images, K classes, D = dim of z.  Entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.bundle.module import Fitted
from psc_core.errors import FitError
from psc_core.heads.temperature import fit_temperature
from psc_core.numerics import linalg
from psc_core.numerics.matrix import FeatureMatrix, as_matrix, blocks

CONSTANT_COLUMN: Final = 1e-6
"""Standard deviation, relative to the largest, below which a column counts as constant."""

NLL_TOLERANCE: Final = 0.001
"""Relative rise of the validation NLL that a wider posterior may cost."""

PRIOR_IMAGES: Final = 1.0
"""Weight of a head's temperature of 1 against the validation images, see :func:`.temperature.fit_temperature`."""


class HeadOutput(NamedTuple):
    """What a head says of a batch.

    Attributes:
        probabilities: Of each class; rows sum to 1.
        epistemic: What more training data would remove, in the head's own ``epistemic_unit``.
    """

    probabilities: Float[Tensor, "batch classes"]
    epistemic: Float[Tensor, " batch"]


class Split(NamedTuple):
    """A predictive uncertainty in its two parts.

    Attributes:
        aleatoric: Ambiguity that remains with the model known, nats.
        epistemic: As in :class:`HeadOutput`.
    """

    aleatoric: Float[Tensor, " batch"]
    epistemic: Float[Tensor, " batch"]


class Head(Fitted):
    """Base of the heads."""

    epistemic_unit: ClassVar[str]

    center: Tensor
    inverse_scale: Tensor

    def standardise(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """φ."""
        return (z - self.center) * self.inverse_scale

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Probabilities and epistemic uncertainty of a batch of feature vectors."""
        raise NotImplementedError

    def split(self, z: Float[Tensor, "batch dim"]) -> Split:
        """Aleatoric and epistemic uncertainty of a batch of feature vectors."""
        raise NotImplementedError


class Standardisation(NamedTuple):
    """Mean and reciprocal deviation of each column, float64."""

    center: Float[Tensor, " dim"]
    inverse_scale: Float[Tensor, " dim"]

    def __call__(self, z: Float[Tensor, "n dim"] | FeatureMatrix) -> FeatureMatrix:
        """φ as float64, computed when it is read: in memory it would grow with the images."""
        return as_matrix(z).map(
            lambda part: part.to(torch.float64, copy=True).sub_(self.center).mul_(self.inverse_scale),
            z.shape[1],
            torch.float64,
        )


def in_memory(rows: FeatureMatrix) -> Float[Tensor, "n dim"]:
    """All rows as one float32 tensor."""
    whole = torch.empty(rows.shape, device=rows.device)
    for chunk, block in blocks(rows):
        whole[chunk] = block
    return whole


@dataclass(frozen=True)
class HeadData:
    """Standardised features that a head is fitted to (train, float64) and chooses its numbers by (val, float32)."""

    train: FeatureMatrix
    train_labels: Int[Tensor, " n"]
    val: Float[Tensor, "m dim"]
    val_labels: Int[Tensor, " m"]
    num_classes: int
    seed: int
    standardisation: Standardisation

    @property
    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors that every head stores."""
        return dict(self.standardisation._asdict())


def fit_standardisation(z: Float[Tensor, "n dim"] | FeatureMatrix) -> Standardisation:
    """Column means and deviations.

    Raises:
        FitError: No column varies.
    """
    center = linalg.mean_of_rows(z)
    squares = torch.zeros_like(center)
    for _, block in blocks(z):
        squares += (block.double() - center).square().sum(0)
    deviation = (squares / len(z)).sqrt()
    largest = deviation.max()
    rounding = torch.finfo(z.dtype).eps * center.abs()
    varies = (deviation > CONSTANT_COLUMN * largest) & (deviation > rounding)
    if not varies.any():
        raise FitError("expected features that differ between images, all are equal; choose another layer")
    return Standardisation(center, torch.where(varies, deviation, largest).reciprocal())


def entropy(probabilities: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch"]:
    """``−Σ_k p_k log p_k`` in nats, 0 log 0 = 0."""
    return cast(Tensor, torch.special.entr(probabilities)).sum(dim=-1)


def nll(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Negative log-likelihood of each label under ``softmax(logits)``, nats."""
    return functional.cross_entropy(logits, labels, reduction="none").double()


class Choice(NamedTuple):
    """The posterior that validation images prefer.

    Attributes:
        precision: τ of the posterior's prior.
        temperature: T that the mean logits are divided by.
        val_nll: Mean validation NLL with both, nats.
    """

    precision: float
    temperature: float
    val_nll: float


def choose_posterior(
    logits_with: Callable[[float], Float[Tensor, "m classes"]],
    labels: Int[Tensor, " m"],
    precisions: Sequence[float],
) -> Choice:
    """The widest posterior that costs next to nothing, with its temperature.

    That is the smallest τ whose mean validation NLL is at most 0.1 % above the smallest, each τ with a temperature of 1
    or the one that suits it best.  The plain minimum over τ is often at infinity: weights that are well calibrated by
    themselves gain nothing from a posterior, the NLL hardly depends on τ, and epistemic uncertainty would vanish for a
    gain that is noise.  The temperature gives back what the posterior, and the weights' own prior, flatten alike for
    all images; it is applied to the mean of the logits, so their variance, and with it what is epistemic, stays.  One
    other than 1 has to gain log(m) / 2 nats over the m rows (Schwarz 1978): within its error a temperature only
    follows the images it was chosen by.

    Args:
        logits_with: Logits of the validation rows, the posterior's variance taken into account, with a given precision.
        labels: Class index of each validation row.
        precisions: To choose from.
    """
    price = math.log(len(labels)) / (2 * len(labels))
    costs: dict[Choice, float] = {}
    temperature = 1.0
    for precision in sorted(precisions, reverse=True):
        logits = logits_with(precision)
        temperature = fit_temperature(logits, labels, prior_images=PRIOR_IMAGES, start=temperature)
        for tried, extra in ((temperature, price), (1.0, 0.0)):
            choice = Choice(precision, tried, nll(logits / tried, labels).mean().item())
            costs[choice] = choice.val_nll + extra
    limit = (1 + NLL_TOLERANCE) * min(costs.values())
    return min((choice for choice in costs if costs[choice] <= limit), key=lambda one: (one.precision, costs[one]))
