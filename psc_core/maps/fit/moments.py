"""Compute the mean and covariance of the channels over images and positions, batch by batch in float64.

For the vectors x of C channels at the positions read,

    μ = (1/N) Σ x          (C,)
    Σ = (1/N) Σ (x − μ)ᵀ(x − μ)      (C, C)

in one pass: each batch is centred on its own mean and merged with the batches before it by the outer product of the
difference between the two means (Chan, Golub & LeVeque 1983), so that nothing cancels.  The same :data:`POSITIONS`
positions are read in each image, drawn once: neighbours are alike, and a pass costs only a few hundredths of the
network's time.  Memory is C² numbers, whatever the number of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.maps.grid import Grid

POSITIONS: Final = 256
"""Maximum number of positions that are read in an image."""

MAX_CHANNELS: Final = 2048
"""Maximum number of channels; their covariance takes 32 MiB."""


class Moments(NamedTuple):
    vectors: int  # number of vectors
    mean: Float[Tensor, " channels"]
    covariance: Float[Tensor, "channels channels"]
    resolution: float  # spacing of the features' dtype at 1


class PositionMoments:
    """The sums over the images so far.

    Args:
        channels: The number of channels, C.
        grid: The grid of the layer; its leading positions are never read.
        device: The device of the features.
    """

    def __init__(self, channels: int, grid: Grid, device: torch.device | str = "cpu") -> None:
        self.grid = grid
        drawn = torch.randperm(grid.rows * grid.columns, generator=torch.Generator().manual_seed(0))[:POSITIONS]
        self._read = (grid.first + drawn.sort().values).to(device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._mean = torch.zeros(channels, dtype=torch.float64, device=device)
        self._products = torch.zeros(channels, channels, dtype=torch.float64, device=device)
        self._resolution = 0.0

    def add(self, features: Float[Tensor, "batch channels positions"]) -> None:
        self._resolution = max(self._resolution, torch.finfo(features.dtype).eps)
        x = features.index_select(2, self._read).double().transpose(1, 2).flatten(0, 1)
        mean = x.mean(dim=0)
        gap = mean - self._mean
        total = self._count + len(x)
        x -= mean
        self._products.addmm_(x.T, x).add_(torch.outer(gap, gap) * (self._count * len(x) / total))
        self._mean += gap * (len(x) / total)
        self._count = total

    def moments(self, sum_: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Moments:
        """Return the moments; ``sum_`` adds a tensor over all processes, each of which has added an image."""
        count = sum_(self._count.clone())
        mean = sum_(self._mean * (self._count / count))
        gap = self._mean - mean
        products = sum_(self._products + self._count * torch.outer(gap, gap))
        return Moments(int(count), mean, products / count, self._resolution)
