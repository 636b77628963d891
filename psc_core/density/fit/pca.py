"""Principal components of z, and how many of them a density keeps.

With ``m = mean(z)`` and ``C = cov(z) = U diag(λ) Uᵀ`` (denominator n − 1, λ descending), a density is
fitted to ``y = (z − m) U[:, :P]``: an orthonormal projection, so ``log p(y)`` is in the units of z.

P, unless the caller gives it, is the smallest of:

* the components that explain 99 % of the variance, or those above a minimum variance, whichever the density asks for;
* the rank: components with a standard deviation above 10⁻⁵ of the largest and above the rounding error of the
  features' own type (constant columns, repeated columns and n ≤ dim leave components below);
* a limit given by the density, so that a class of average size has more images than components.

The covariance is dim × dim in float64, so dim up to about 4,096 is practical (128 MiB).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError
from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix

EXPLAINED_VARIANCE: Final = 0.99
"""Fraction of the variance that the automatic choice keeps."""

RANK_TOLERANCE: Final = 1e-10
"""Smallest variance of a component that counts for the rank, relative to the largest."""


class PCA(NamedTuple):
    """A fitted projection, float64."""

    mean: Float[Tensor, " dim"]  # of z
    components: Float[Tensor, "dim kept"]  # orthonormal columns, largest variance first
    variances: Float[Tensor, " kept"]  # of each kept component
    explained: float  # fraction of the total variance that is kept

    @property
    def whitening(self) -> Float[Tensor, "dim kept"]:
        """``U diag(λ^(−1/2))``: takes z − mean to coordinates of unit variance."""
        return self.components * self.variances.rsqrt()

    def whiten(self, z: FeatureMatrix) -> FeatureMatrix:
        """Return ``(z − mean) @ whitening``, float64 (n, kept), which is computed as it is read."""
        whitening = self.whitening
        return z.map(lambda part: (part.double() - self.mean) @ whitening, whitening.shape[1], torch.float64)


def fit_pca(
    z: Float[Tensor, "n dim"] | FeatureMatrix,
    *,
    kept: int | None,
    limit: int,
    minimum_variance: float | None = None,
    feature_dtype: torch.dtype | None = None,
) -> PCA:
    """Fit the projection to features.

    Args:
        z: The features.
        kept: Number of components P; ``None`` chooses it by the rule of this module.
        limit: Largest number that the automatic choice may take.
        minimum_variance: Fraction of the largest variance above which the automatic choice keeps a component; ``None``
            keeps those that explain 99 %.
        feature_dtype: Type that the features were computed in; by default that of ``z``.

    Raises:
        FitError: If all features are equal, or ``kept`` is not between 1 and the rank.
    """
    mean = linalg.mean_of_rows(z)
    # A single image has no variance: zero is refused below as rank 0, where 0 / 0 would be NaN.
    covariance = linalg.scatter_about(z, mean) / max(1, len(z) - 1)
    values, vectors = linalg.eigh(covariance)
    # The error of rounded features along each component: some steps of their size, for which their mean stands.
    rounding = linalg.rounding_of(mean.abs() @ vectors.abs(), feature_dtype or z.dtype)
    significant = values > torch.maximum(RANK_TOLERANCE * values[0], rounding.square())
    # Up to the first that is not significant: the rounding error, unlike the variance, need not descend.
    rank = int(significant.long().cumprod(0).sum())
    if rank == 0:
        raise FitError(
            "expected features that differ between images, all are equal up to rounding; choose another layer"
        )
    explained = values.cumsum(0) / values.sum()
    if kept is None:
        if minimum_variance is None:
            enough = int((explained < EXPLAINED_VARIANCE).sum()) + 1
        else:
            enough = int((values > minimum_variance * values[0]).sum())
        kept = max(1, min(enough, rank, limit))
    elif not 1 <= kept <= rank:
        raise FitError(
            f"expected 1 ≤ pca ≤ {rank} (the rank of {len(z)} × {z.shape[1]} features), got {kept}; "
            "give a smaller number or none, to choose it from the data"
        )
    return PCA(mean, vectors[:, :kept], values[:kept], explained[kept - 1].item())
