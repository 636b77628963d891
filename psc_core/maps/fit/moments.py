"""Mean and covariance of the channels over images and positions, batch by batch in float64.

For the vectors x of C channels at the positions that are read,

    μ = (1/N) Σ x          (C,)
    Σ = (1/N) Σ (x − μ)ᵀ(x − μ)      (C, C)

in one pass: a batch is centred on its own mean and merged with those before it by the outer product of the difference
of the two means (Chan, Golub & LeVeque 1983), so that nothing cancels.  Of each image the same :data:`POSITIONS`
positions are read, drawn once: neighbours are alike, and what a pass costs stays a few hundredths of the network's
share.  Memory is C² numbers, whatever the images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.maps.grid import Grid

POSITIONS: Final = 256
"""Maximum number of positions of an image that are read."""

MAX_CHANNELS: Final = 2048
"""Maximum number of channels, whose covariance takes 32 MiB."""


class Moments(NamedTuple):
    """Moments of the channels, float64."""

    vectors: int  # how many
    mean: Float[Tensor, " channels"]
    covariance: Float[Tensor, "channels channels"]
    resolution: float  # spacing of the features' float type at 1


class PositionMoments:
    """Sums over the images so far.

    Args:
        channels: C.
        grid: Of the layer; its leading positions are never read.
        device: Of the features.
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
        """Merge a batch."""
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
        """Return the moments; ``sum_`` adds a tensor over processes, each of which has seen an image."""
        count = sum_(self._count.clone())
        mean = sum_(self._mean * (self._count / count))
        gap = self._mean - mean
        products = sum_(self._products + self._count * torch.outer(gap, gap))
        return Moments(int(count), mean, products / count, self._resolution)
