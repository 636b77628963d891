"""Mean and covariance of groups of vectors, accumulated batch by batch in float64.

For the N vectors x of each of G groups,

    μ = (1/N) Σ x          (G, d)
    Σ = (1/N) Σ (x − μ)ᵀ(x − μ)      (G, d, d)

in one pass: each batch, of b vectors with the mean m, is centred on its own mean and merged with the batches before it
by n b / (n + b) times the outer product of m − μ (Chan, Golub & LeVeque 1983).  Only centred products are added, so
nothing cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Moments(NamedTuple):
    """Mean and covariance of the vectors of each group, float64."""

    vectors: int  # their number
    mean: Float[Tensor, "groups dim"]
    covariance: Float[Tensor, "groups dim dim"]


class MomentSums:
    """The sums over the vectors so far, G · d² numbers whatever their number."""

    def __init__(self, groups: int, dim: int, device: torch.device | str = "cpu") -> None:
        self._count = 0
        self._mean = torch.zeros(groups, dim, dtype=torch.float64, device=device)
        self._products = self._mean.new_zeros(groups, dim, dim)

    def add(self, vectors: Float[Tensor, "batch groups dim"]) -> None:
        """Merge a batch of at least one vector, which is not modified."""
        x = vectors.transpose(0, 1).to(torch.float64, copy=True)
        mean, total = x.mean(1), self._count + len(vectors)
        gap = mean - self._mean
        x -= mean[:, None]
        self._products.baddbmm_(x.transpose(1, 2), x)
        self._merge(gap, self._count * len(vectors) / total)
        self._mean += gap * (len(vectors) / total)
        self._count = total

    def finish(self, sum_: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Moments:
        """Return the moments and use up the sums, whose memory the covariance takes.

        Args:
            sum_: A function that adds a tensor over all processes, each of which has added a vector.
        """
        total = sum_(self._mean.new_tensor(float(self._count)))
        mean = sum_(self._mean * (self._count / total))
        if int(total) > self._count:
            self._merge(self._mean - mean, float(self._count))
        return Moments(int(total), mean, sum_(self._products).div_(total))

    def _merge(self, gap: Float[Tensor, "groups dim"], weight: float) -> None:
        self._products.baddbmm_(gap[:, :, None], gap[:, None], alpha=weight)
