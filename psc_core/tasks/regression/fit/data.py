"""The data to which a regression's head is fitted."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from psc_core.tasks.fit.standardisation import HeadData


@dataclass(frozen=True, kw_only=True)
class RegressionData(HeadData):
    """Standardised features and numbers, all float64: (y − center) / scale has mean 0, deviation 1."""

    train_values: Float[Tensor, " n"]
    train_images: Int[Tensor, " n"]  # which image of the training data each one is
    selection_values: Float[Tensor, " m"]
    selection_mean: Float[Tensor, " m"] | None  # what is served in place of the head's mean
    center: Float[Tensor, ""]  # target's unit
    scale: Float[Tensor, ""]
    widths: tuple[int, ...]  # columns of z, then of each earlier layer
