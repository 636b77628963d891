"""Compute the mean and covariance of the channels over images and positions, see :mod:`psc_core.numerics.moments`.

The same :data:`POSITIONS` positions are read in each image, drawn once: neighbours are alike, and a pass costs only a
few hundredths of the network's time.  Memory is C² numbers, whatever the number of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.maps.grid import Grid
from psc_core.numerics.moments import MomentSums

POSITIONS: Final = 256
"""Maximum number of positions that are read in an image."""

MAX_CHANNELS: Final = 2048
"""Maximum number of channels; their covariance takes 32 MiB."""


class LayerMoments(NamedTuple):
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
        self._sums = MomentSums(1, channels, device)
        self._resolution = 0.0

    def add(self, features: Float[Tensor, "batch channels positions"]) -> None:
        self._resolution = max(self._resolution, torch.finfo(features.dtype).eps)
        self._sums.add(features.index_select(2, self._read).transpose(1, 2).reshape(-1, 1, features.shape[1]))

    def finish(self, sum_: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> LayerMoments:
        """Return the moments and use up the sums; ``sum_`` adds a tensor over all processes, each with an image."""
        vectors, mean, covariance = self._sums.finish(sum_)
        return LayerMoments(vectors, mean[0], covariance[0], self._resolution)
