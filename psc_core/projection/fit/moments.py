"""Measure channelwise mean and covariance of a layer's features (paper, Algorithm 2, appendix A.2.2).

Axes: B batch, C channels, d spatial positions (of all candidate layers, concatenated channel by channel).
Every channel is a group of :mod:`psc_core.numerics.moments`; covariance between channels is never formed.

Standard deviations are clamped to at least :data:`.DEAD_UNIT` of their root mean square over the layer, so that a unit
silent on the training data cannot dominate after scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError
from psc_core.numerics.linalg import DEAD_UNIT, rounding_of, sizes_of
from psc_core.numerics.moments import MomentSums


@dataclass(frozen=True)
class ChannelMoments:
    """Mean and covariance of X, float64."""

    count: int  # number of labelled examples
    mean: Float[Tensor, "channels positions"]
    covariance: Float[Tensor, "channels positions positions"]

    def std(self) -> Float[Tensor, "channels positions"]:
        """Return the standard deviations, at least :data:`.DEAD_UNIT` of their root mean square; ∞, which scales to 0,
        where that is no more than rounding.

        Raises:
            FitError: If every unit is constant, up to rounding.
        """
        std = self.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        scale = float(std.square().mean().sqrt())
        clamped = std.clamp_min(DEAD_UNIT * scale)
        varies = clamped > rounding_of(sizes_of(self.mean))
        if scale == 0.0 or not bool((varies & (std > 0)).any()):
            raise FitError(
                "every unit of the candidate layer is constant over the training images, up to rounding; choose "
                "another layer, or check the images, the weights and the running statistics of batch normalisation"
            )
        return torch.where(varies, clamped, math.inf)

    def correlation(self) -> Float[Tensor, "channels positions positions"]:
        """Return D⁻¹ Σ_c D⁻¹ with D = diag(std), the tensor that is decomposed; it is as large as the covariance."""
        std = self.std()
        return (self.covariance / std[:, :, None]).div_(std[:, None, :])


def channel_moments(
    batches: Iterable[Float[Tensor, "batch channels positions"]],
    *,
    all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> ChannelMoments:
    """Return mean and covariance of every channel, from one pass over features of any float type.

    Args:
        batches: The features, batch after batch.
        all_reduce: A function that sums a tensor over all processes.

    Raises:
        FitError: If there are no features, or a value is not finite.
    """
    sums: MomentSums | None = None
    for features in batches:
        if sums is None:
            sums = MomentSums(features.shape[1], features.shape[2], features.device)
        sums.add(features)
    if sums is None:
        raise FitError("expected at least one training image, got none")
    moments = sums.finish(all_reduce)
    if not bool(moments.mean.isfinite().all()):
        raise FitError("the candidate layer's features are not finite; check the weights or use --precision fp32")
    return ChannelMoments(*moments)
