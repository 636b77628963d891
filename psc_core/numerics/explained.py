"""R², the fraction of the variance that predictions explain, from their squared errors.

    R² = 1 − Σ_i e_i / Σ_i (y_i − ȳ)²,   e_i = (y_i − ŷ_i)²          y, ŷ (n,) float64, in one unit

If all numbers are equal, there is no variance to explain: then R² is 1 if all predictions are exact and 0 otherwise, as
in scikit-learn's ``r2_score``, so that it is always finite.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def r_squared(squared_errors: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    total, left = total_squares(y), float(squared_errors.sum())
    return 1.0 - left / total if total > 0 else float(left == 0)


def r_squared_error(one: Float[Tensor, " n"], other: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Return the standard error of the difference between two R², from the squared errors of both."""
    total = total_squares(y)
    return float((one - other).norm()) / total if total > 0 else 0.0


def total_squares(y: Float[Tensor, " n"]) -> float:
    """Return Σ (y − ȳ)²; exactly 0 if all numbers are equal, in spite of the rounding of ȳ."""
    return 0.0 if bool((y == y[0]).all()) else float((y - y.mean()).square().sum())
