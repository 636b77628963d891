"""Float64 linear algebra on matrices read in blocks: eigenproblems, covariances, moments, R² and tails.

Symbols: ``n`` rows, ``d`` columns of a feature matrix; ``C`` a ``d × d`` covariance; ``λ, U`` its eigenvalues and
eigenvectors, ``C = U diag(λ) Uᵀ``.

Covariances are sums of centred outer products over blocks of rows, with the mean first, so that nothing cancels and no
feature matrix is copied to float64 as a whole.  Where the mean is not known first, each batch of b vectors is centred
on its own mean m and merged with the n vectors before it by n b / (n + b) times the outer product of m − μ (Chan, Golub
& LeVeque 1983).  Singular covariances are repaired by raising small eigenvalues to a floor; the number raised and the
largest increase are returned, so that callers can record them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.numerics.features import FeatureMatrix, blocks

# Minimum standard deviation that features are divided by, relative to the root mean square over their layer.
DEAD_UNIT: Final = 1e-2

# Maximum standard deviation that rounding alone may give to a float32 feature, in steps of its values. A product of a
# thousand terms errs by a few steps of the largest, and differently in batches of other sizes.
ROUNDING_STEPS: Final = 64

# Minimum eigenvalue where 1 is typical, because float32 features do not resolve standard deviations 1,000 times smaller
# than typical ones.
EIGENVALUE_FLOOR: Final = 1e-6

SAMPLES_PER_COLUMN: Final = 10  # minimum degrees of freedom per column for a covariance that is not shrunk


class Eigen(NamedTuple):
    """The decomposition ``C = vectors @ diag(values) @ vectors.T``, values descending."""

    values: Float[Tensor, " d"]
    vectors: Float[Tensor, "d d"]


class InverseRoot(NamedTuple):
    """The inverse square root ``C^(−1/2)``, with eigenvalues clamped to a floor."""

    root: Float[Tensor, "d d"]  # symmetric, root @ C @ root = I
    log_det: float  # log det C of the clamped matrix
    n_clamped: int  # number of eigenvalues below the floor
    largest_increase: float  # largest amount added to an eigenvalue


def rounding_of(size: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the largest standard deviation that rounding alone may give to features of this size.

    Example:
        >>> bool(rounding_of(torch.tensor(1.0)) < 1e-5)
        True
    """
    return ROUNDING_STEPS * torch.finfo(dtype).eps * size.abs()


def sizes_of(mean: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the size of each feature of a layer with this mean, at least the median of the layer.

    A feature whose mean is zero by chance is a sum of terms as large as the others'; the few of a transformer that are
    a thousand times larger say nothing of these.
    """
    return torch.maximum(mean.abs(), mean.abs().median())


def fix_signs(vectors: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """Flip the sign of each column so that its entry of largest magnitude is positive, for reproducible fits."""
    if vectors.numel() == 0:
        return vectors
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors.dtype)


def eigh(matrix: Float[Tensor, "d d"]) -> Eigen:
    """Decompose a symmetric positive semi-definite matrix into eigenvalues and eigenvectors, in float64.

    The matrix is symmetrised first, and negative round-off in the values is clamped to zero.  If the device's solver
    fails (CUDA's may, on low-rank input), the CPU's is used.  The result is on the input's device.
    """
    symmetric = 0.5 * (matrix.double() + matrix.double().T)
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except RuntimeError:
        values, vectors = (part.to(matrix.device) for part in torch.linalg.eigh(symmetric.cpu()))
    return Eigen(values.flip(0).clamp(min=0.0), fix_signs(vectors.flip(1)))


def inverse_root(matrix: Float[Tensor, "d d"]) -> InverseRoot:
    """Return the symmetric inverse square root of a covariance; eigenvalues are about 1, or clamped to a floor."""
    values, vectors = eigh(matrix)
    clamped = values.clamp(min=EIGENVALUE_FLOOR)
    root = (vectors * clamped.rsqrt()) @ vectors.T
    increase = clamped - values
    return InverseRoot(root, clamped.log().sum().item(), int((increase > 0).sum()), increase.max().item())


def mean_of_rows(rows: Float[Tensor, "n d"] | FeatureMatrix) -> Float[Tensor, " d"]:
    """Return the mean over rows in float64, computed block by block."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for _, block in blocks(rows):
        total += block.double().sum(0)
    return total / len(rows)


def scatter_about(rows: Float[Tensor, "n d"] | FeatureMatrix, mean: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
    """Return ``Σ_i (x_i − mean)(x_i − mean)ᵀ`` in float64, computed block by block."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for _, block in blocks(rows):
        centred = block.double() - mean
        total += centred.T @ centred
    return total


def covariance(scatter: Float[Tensor, "d d"], degrees_of_freedom: int) -> tuple[Float[Tensor, "d d"], float]:
    """Return ``scatter / degrees_of_freedom``, shrunk if these are few, and the shrinkage intensity ρ in [0, 1]."""
    sample = scatter / degrees_of_freedom
    if degrees_of_freedom >= SAMPLES_PER_COLUMN * len(scatter):
        return sample, 0.0
    return oas_shrinkage(sample, degrees_of_freedom)


def oas_shrinkage(covariance: Float[Tensor, "d d"], samples: int) -> tuple[Float[Tensor, "d d"], float]:
    """Shrink a covariance towards ``(tr C / d) I`` by oracle approximation.

    ``ρ = min(1, ((1 − 2/d) tr C² + tr² C) / ((m + 1 − 2/d)(tr C² − tr² C / d)))`` and
    ``C ← (1 − ρ) C + ρ (tr C / d) I``; Chen, Wiesel, Eldar & Hero 2010, equation 23.

    ``m`` is ``samples``, the degrees of freedom of the sample covariance ``C``.

    ρ is 1 when ``C`` is a multiple of the identity or zero.
    """
    d = covariance.shape[0]
    trace = covariance.trace()
    trace_of_square = covariance.square().sum()
    spread = (samples + 1 - 2 / d) * (trace_of_square - trace.square() / d)
    pull = (1 - 2 / d) * trace_of_square + trace.square()
    rho = 1.0 if spread <= 0 else min(1.0, (pull / spread).item())
    target = (trace / d) * torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    return (1 - rho) * covariance + rho * target, rho


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

        ``sum_`` adds a tensor over all processes, each of which has added a vector.
        """
        total = sum_(self._mean.new_tensor(float(self._count)))
        mean = sum_(self._mean * (self._count / total))
        if int(total) > self._count:
            self._merge(self._mean - mean, float(self._count))
        return Moments(int(total), mean, sum_(self._products).div_(total))

    def _merge(self, gap: Float[Tensor, "groups dim"], weight: float) -> None:
        self._products.baddbmm_(gap[:, :, None], gap[:, None], alpha=weight)


def r_squared(squared_errors: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Return R² = 1 − Σ_i (y_i − ŷ_i)² / Σ_i (y_i − ȳ)², the fraction of the variance that predictions explain.

    If all numbers are equal, it is 1 if all predictions are exact and 0 otherwise, as in scikit-learn's ``r2_score``.
    """
    total, left = total_squares(y), float(squared_errors.sum())
    return 1.0 - left / total if total > 0 else float(left == 0)


def r_squared_error(one: Float[Tensor, " n"], other: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Return the standard error of the difference between two R², from the squared errors of both."""
    total = total_squares(y)
    return float((one - other).norm()) / total if total > 0 else 0.0


def total_squares(y: Float[Tensor, " n"]) -> float:
    """Return Σ (y − ȳ)²; exactly 0 if all numbers are equal, in spite of the rounding of ȳ."""
    return 0.0 if bool((y == y[0]).all()) else float((y - y.mean()).square().sum())


TAIL_FRACTION: Final = 0.05  # fraction of the values that are the tail


def tail_excess(ascending: Float[Tensor, "m ..."], k: int) -> Float[Tensor, "..."]:
    """Return the mean excess of the k largest values of each column over the next smaller one, float64."""
    wide = ascending.double()
    return (wide[len(wide) - k :] - wide[max(0, len(wide) - k - 1)]).mean(dim=0)
