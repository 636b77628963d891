"""Channelwise mean and covariance of a layer's features (paper, Algorithm 2).

Axes: B batch, C channels, d spatial positions (of all candidate layers, concatenated channel by channel).
For every channel c,

    μ_c = (1/N) Σ_i X_ic            (C, d)
    Σ_c = (1/N) Σ_i (X_ic − μ_c)ᵀ(X_ic − μ_c)   (C, d, d)

in two passes: the mean exactly first, then centred products.  All sums are float64; covariance between
channels is never formed.  Units whose standard deviation is below :data:`DEAD_UNIT` of the layer's root
mean square one get that floor, so that a unit silent on the training data cannot dominate after scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError

DEAD_UNIT = 1e-2
"""Smallest standard deviation kept, relative to the root mean square of the layer's."""

Passes = Callable[[], Iterable[Float[Tensor, "batch channels positions"]]]
"""Each call starts one more pass over the same features."""

Sum = Callable[[Tensor], Tensor]
"""All-reduces a tensor over processes; the identity in one process."""


@dataclass(frozen=True)
class ChannelMoments:
    """Moments of X.

    Attributes:
        count: Number of rows summed.
        mean: ``float64 (C, d)``.
        covariance: ``float64 (C, d, d)``.
    """

    count: int
    mean: Float[Tensor, "channels positions"]
    covariance: Float[Tensor, "channels positions positions"]

    def std(self) -> Float[Tensor, "channels positions"]:
        """Standard deviations with the floor of :data:`DEAD_UNIT`.

        Raises:
            FitError: Every unit is constant.
        """
        std = self.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        scale = float(std.square().mean().sqrt())
        if scale == 0.0:
            raise FitError(
                "expected features that vary over the training images, every unit of the candidate "
                "layer is constant; choose another layer or check the images and the weights"
            )
        return std.clamp_min(DEAD_UNIT * scale)

    def correlation(self) -> Float[Tensor, "channels positions positions"]:
        """D⁻¹ Σ_c D⁻¹ with D = diag(std): the tensor that is decomposed."""
        std = self.std()
        return self.covariance / (std[:, :, None] * std[:, None, :])


def channel_moments(passes: Passes, *, all_reduce: Sum = lambda tensor: tensor) -> ChannelMoments:
    """Mean and covariance of every channel in two passes.

    Args:
        passes: Starts a pass over the feature batches, (B, C, d) of any float type.
        all_reduce: Sums over processes.

    Raises:
        FitError: No features, or a value that is not finite.
    """
    total: Tensor | None = None
    count = 0
    for features in passes():
        batch = features.double().sum(0)
        total = batch if total is None else total + batch
        count += len(features)
    if total is None:
        raise FitError("expected at least one image to take moments of, got none")
    rows = all_reduce(torch.tensor([float(count)], dtype=torch.float64, device=total.device))
    mean = all_reduce(total) / rows
    if not bool(mean.isfinite().all()):
        raise FitError(
            "expected finite features, the candidate layer gives NaN or infinity; check the weights "
            "or use --precision fp32"
        )
    products = torch.zeros(*mean.shape, mean.shape[1], dtype=torch.float64, device=mean.device)
    for features in passes():
        centred = (features.double() - mean).transpose(0, 1)
        products.baddbmm_(centred.transpose(1, 2), centred)
    covariance = all_reduce(products) / rows
    return ChannelMoments(int(rows), mean, covariance)
