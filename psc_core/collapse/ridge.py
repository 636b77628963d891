r"""Fit a ridge regression to each layer; its R² is for a regression what NC4 is for classes.

For each layer, with h the features of an image, flattened, and y its number,

    x = S h                                S: a count sketch (Charikar, Chen & Farach-Colton 2002) where h is wide
    w_λ = (Σ_xx + λ I)^{-1} Σ_xy           from sums over the training images
    λ = argmin GCV(λ) = n RSS(λ) / (n − 1 − df(λ))²,   df(λ) = Σ_j e_j / (e_j + λ)    (Golub, Heath & Wahba 1979)
    R² = 1 − Σ_i (y_i − ŷ_i)² / Σ_i (y_i − ȳ)²        over the validation images (:mod:`psc_core.numerics.explained`)
    its error = √(Σ_i d_i²) / Σ_i (y_i − ȳ)²          standard error of its difference to the best layer's R²

with e_j the eigenvalues of Σ_xx and d_i the difference of the two layers' squared errors of image i.  A count sketch
adds each feature, with a random sign, to one of :data:`SKETCH` columns; it keeps inner products on average, so a linear
function of h is about one of x.  All sums are float64.  The analogy is ours, not the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.numerics.linalg import eigh

SKETCH: Final = 512
"""Columns of a count sketch."""

PENALTIES: Final = torch.logspace(-8, 2, 21, dtype=torch.float64)
"""Values of λ to choose from, relative to the mean variance of a column."""


class CountSketch:
    """A count sketch of features of one width; narrow features stay as they are.

    Args:
        width: Number of columns of the flattened features.
        device: The device of the features.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.columns = min(width, SKETCH)
        generator = torch.Generator().manual_seed(width)
        self.target = torch.randint(0, SKETCH, (width,), generator=generator).to(device)
        self.sign = (1.0 - 2.0 * torch.randint(0, 2, (width,), generator=generator)).to(device)

    def __call__(self, features: Float[Tensor, "batch width"]) -> Float[Tensor, "batch columns"]:
        """Return x, float64."""
        if features.shape[1] == self.columns:
            return features.double()
        sketch = torch.zeros(len(features), self.columns, device=features.device)
        return sketch.index_add_(1, self.target, features.float() * self.sign).double()


class RidgeSums:
    """Sums over the training images seen so far: n, Σ x, Σ y, Σ x xᵀ, Σ x y, Σ y², float64, in one matrix."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(columns + 2, columns + 2, dtype=torch.float64, device=device)

    def add(self, x: Float[Tensor, "batch columns"], y: Float[Tensor, " batch"]) -> None:
        """Add a batch."""
        whole = torch.cat([torch.ones_like(y)[:, None], x, y[:, None]], dim=1)
        self.sums.addmm_(whole.T, whole)

    def all_reduce(self, sum_: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of all processes by ``sum_``."""
        self.sums = sum_(self.sums)


class Ridge(NamedTuple):
    """A fitted regression, ŷ = intercept + xᵀ weight."""

    weight: Float[Tensor, " columns"]
    intercept: Float[Tensor, ""]

    def __call__(self, x: Float[Tensor, "batch columns"]) -> Float[Tensor, " batch"]:
        return x @ self.weight + self.intercept


def fit_ridge(sums: RidgeSums) -> Ridge:
    """Return the ridge regression with the penalty of the smallest GCV; for constant features it predicts the mean."""
    total = sums.sums
    n, mean = total[0, 0], total[0, 1:] / total[0, 0]
    centred = total[1:, 1:] - n * torch.outer(mean, mean)
    xx, xy, yy = centred[:-1, :-1], centred[:-1, -1], centred[-1, -1]
    values, vectors = eigh(xx)
    rotated = vectors.T @ xy
    scale = values.mean()
    if scale <= 0:
        return Ridge(torch.zeros_like(xy), mean[-1])
    penalties = (PENALTIES.to(xx.device) * scale)[:, None]
    weights = rotated / (values + penalties)
    residual = yy - 2 * weights @ rotated + weights.square() @ values
    freedom = (n - 1 - (values / (values + penalties)).sum(1)).clamp(min=1e-3)
    best = weights[(residual.clamp(min=0) / freedom.square()).argmin()]
    weight = vectors @ best
    return Ridge(weight, mean[-1] - mean[:-1] @ weight)
