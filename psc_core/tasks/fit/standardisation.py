"""Standardised features, to which every head is fitted; a head stores how to make them.

``φ = (z − center) · inverse_scale`` has unit variance in every column, measured on the training features, so that
priors and length-scales mean the same whatever the units of z.  A column that is constant in training carries no
signal; it is divided by the largest deviation of any column, so that a later change counts as a change of that column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError
from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix, as_matrix, blocks

CONSTANT_COLUMN: Final = 1e-6
"""Standard deviation, relative to the largest, below which a column counts as constant."""


class Standardisation(NamedTuple):
    """Mean and reciprocal standard deviation of each column, float64; every head stores both."""

    center: Float[Tensor, " dim"]
    inverse_scale: Float[Tensor, " dim"]

    def __call__(self, z: Float[Tensor, "n dim"] | FeatureMatrix) -> FeatureMatrix:
        """Return φ as float64, computed when it is read: memory does not grow with the images."""
        return as_matrix(z).map(
            lambda part: part.to(torch.float64, copy=True).sub_(self.center).mul_(self.inverse_scale),
            z.shape[1],
            torch.float64,
        )


@dataclass(frozen=True, kw_only=True)
class HeadData:
    """Base of the data that a head is fitted to: standardised features of the training and the selection split."""

    train: FeatureMatrix  # float64, to fit to
    selection: Float[Tensor, "m dim"]  # to choose hyperparameters by
    seed: int
    standardisation: Standardisation


def in_memory(features: FeatureMatrix) -> Float[Tensor, "n dim"]:
    """Return the whole matrix as one float32 tensor."""
    whole = torch.empty(features.shape, device=features.device)
    for chunk, block in blocks(features):
        whole[chunk] = block
    return whole


def fit_standardisation(
    z: Float[Tensor, "n dim"] | FeatureMatrix, widths: Sequence[int] | None = None
) -> Standardisation:
    """Return the means and reciprocal standard deviations of the columns.

    Args:
        z: The training features.
        widths: The number of columns of each layer; None if all columns are of one.

    Raises:
        FitError: If no column varies by more than rounding.
    """
    center = linalg.mean_of_rows(z)
    squares = torch.zeros_like(center)
    for _, block in blocks(z):
        squares += (block.double() - center).square().sum(0)
    deviation = (squares / len(z)).sqrt()
    largest = deviation.max()
    layers = torch.split(center, [len(center)] if widths is None else [*widths])
    sizes = torch.cat([linalg.sizes_of(layer) for layer in layers])
    varies = (deviation > CONSTANT_COLUMN * largest) & (deviation > linalg.rounding_of(sizes, z.dtype))
    if not varies.any():
        raise FitError(
            "expected features that differ between images, all are equal up to rounding; choose another layer"
        )
    return Standardisation(center, torch.where(varies, deviation, largest).reciprocal())
