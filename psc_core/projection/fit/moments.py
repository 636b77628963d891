"""Measure channelwise mean and covariance of a layer's features (paper, Algorithm 2, appendix A.2.2).

Axes: B batch, C channels, d spatial positions (of all candidate layers, concatenated channel by channel).
For every channel c,

    μ_c = (1/N) Σ_i X_ic            (C, d)
    Σ_c = (1/N) Σ_i (X_ic − μ_c)ᵀ(X_ic − μ_c)   (C, d, d)

in one pass: each batch is centred on its own mean, and merged with the batches before it by the outer product of the
difference of the two means (Chan, Golub & LeVeque 1983), one more row of the same matrix product.  Only centred
products are added, so nothing cancels.  All sums are float64; covariance between channels is never formed.

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
from psc_core.numerics.linalg import DEAD_UNIT


@dataclass(frozen=True)
class ChannelMoments:
    """Mean and covariance of X, float64."""

    count: int  # number of labelled examples
    mean: Float[Tensor, "channels positions"]
    covariance: Float[Tensor, "channels positions positions"]

    def std(self) -> Float[Tensor, "channels positions"]:
        """Return the standard deviations, at least :data:`.DEAD_UNIT` of their root mean square.

        Raises:
            FitError: If every unit is constant.
        """
        std = self.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        scale = float(std.square().mean().sqrt())
        if scale == 0.0:
            raise FitError(
                "every unit of the candidate layer is constant over the training images; choose another layer, or "
                "check the images and the weights"
            )
        return std.clamp_min(DEAD_UNIT * scale)

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
    count = 0
    mean: Tensor | None = None
    products: Tensor | None = None
    for features in batches:
        examples = len(features)
        batch = features.double()
        batch_mean = batch.mean(0)
        if mean is None or products is None:
            mean = torch.zeros_like(batch_mean)
            products = mean.new_zeros(*mean.shape, mean.shape[1])
        gap = batch_mean - mean
        weight = math.sqrt(count * examples / (count + examples))
        centred = torch.cat([batch - batch_mean, weight * gap[None]]).transpose(0, 1)
        products.baddbmm_(centred.transpose(1, 2), centred)
        count += examples
        mean += gap * (examples / count)
    if mean is None or products is None:
        raise FitError("expected at least one training image, got none")
    total = all_reduce(torch.tensor([float(count)], dtype=torch.float64, device=mean.device))
    fraction = count / total
    whole_mean = all_reduce(mean * fraction)
    if not bool(whole_mean.isfinite().all()):
        raise FitError("the candidate layer's features are not finite; check the weights or use --precision fp32")
    gap = (mean - whole_mean)[:, :, None]
    if int(total) > count:
        products.baddbmm_(gap, gap.transpose(1, 2), alpha=count)
    return ChannelMoments(int(total), whole_mean, all_reduce(products).div_(total))
