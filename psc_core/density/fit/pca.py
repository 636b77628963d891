"""Principal components of z, and how many of them a density keeps.

With ``m = mean(z)`` and ``C = cov(z) = U diag(λ) Uᵀ`` (denominator n − 1, λ descending), a density is one
of ``y = (z − m) U[:, :P]``: an orthonormal projection, so ``log p(y)`` is in the units of z.

How many (P), when the caller does not say — the smallest of:

* the components that explain 99 % of the variance, or those with more than a least variance, as the density says;
* the rank: components with a standard deviation above 10⁻⁵ of the largest and above the rounding of the
  features' own type (constant columns, repeated columns and n ≤ dim end up below);
* a limit the density gives, so that an ordinary class has more images than components.

The covariance is dim × dim in float64, so dim up to about 4,096 is practical (128 MiB).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError
from psc_core.numerics import linalg
from psc_core.numerics.matrix import FeatureMatrix

EXPLAINED_VARIANCE: Final = 0.99
"""Fraction of the variance that the automatic choice keeps."""

RANK_TOLERANCE: Final = 1e-10
"""Smallest variance of a component, relative to the largest."""


class PCA(NamedTuple):
    """A fitted projection, float64.

    Attributes:
        mean: Of z.
        components: Orthonormal columns, largest variance first.
        variances: Variance of each kept component.
        explained: Fraction of the total variance that is kept.
    """

    mean: Float[Tensor, " dim"]
    components: Float[Tensor, "dim kept"]
    variances: Float[Tensor, " kept"]
    explained: float

    @property
    def whitening(self) -> Float[Tensor, "dim kept"]:
        """``U diag(λ^(−1/2))``: takes z − mean to coordinates of unit variance."""
        return self.components * self.variances.rsqrt()

    def whiten(self, z: FeatureMatrix) -> FeatureMatrix:
        """``(z − mean) @ whitening`` in float64, (n, kept), computed when it is read."""
        whitening = self.whitening
        return z.map(lambda part: (part.double() - self.mean) @ whitening, whitening.shape[1], torch.float64)


def fit_pca(
    z: Float[Tensor, "n dim"] | FeatureMatrix, *, kept: int | None, limit: int, least_variance: float | None = None
) -> PCA:
    """Fit the projection.

    Args:
        z: Features; at least two distinct rows.
        kept: Number of components; ``None`` chooses by the rule of this module.
        limit: Largest number the automatic choice may take.
        least_variance: Relative to the largest; the automatic choice keeps what is above it instead of 99 %.

    Raises:
        FitError: All rows are equal, or ``kept`` is not between 1 and the rank.
    """
    mean = linalg.mean_of_rows(z)
    covariance = linalg.scatter_about(z, mean) / max(1, len(z) - 1)
    values, vectors = linalg.eigh(covariance)
    rounding = torch.finfo(z.dtype).eps * (mean.abs() @ vectors.abs())
    present = values > torch.maximum(RANK_TOLERANCE * values[0], rounding.square())
    rank = int(present.long().cumprod(0).sum())
    if rank == 0:
        raise FitError("expected features that differ between images, all are equal; choose another layer")
    share = values.cumsum(0) / values.sum()
    if kept is None:
        if least_variance is None:
            enough = int((share < EXPLAINED_VARIANCE).sum()) + 1
        else:
            enough = int((values > least_variance * values[0]).sum())
        kept = max(1, min(enough, rank, limit))
    elif not 1 <= kept <= rank:
        raise FitError(
            f"expected 1 ≤ pca ≤ {rank} (the rank of {len(z)} feature rows of {z.shape[1]} "
            f"columns), got {kept}; choose a smaller number or leave the choice to the data"
        )
    return PCA(mean, vectors[:, :kept], values[:kept], share[kept - 1].item())
