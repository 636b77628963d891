"""The tail of held-out readings.

Beyond the largest of m readings ``r_1 ≤ … ≤ r_m`` a p-value falls exponentially; the scale is the mean excess of the k
largest over the next smaller one,

    (1/k) Σ_{i > m − k} r_i − r_{m−k}      with r_1 in place of r_{m−k} where k = m
"""

from __future__ import annotations

from typing import Final

from jaxtyping import Float
from torch import Tensor

TAIL_FRACTION: Final = 0.05
"""Fraction of the readings that are the tail."""


def tail_excess(ascending: Float[Tensor, "m ..."], k: int) -> Float[Tensor, "..."]:
    """Return the mean excess of the k largest readings of each column over the next smaller one, float64."""
    wide = ascending.double()
    return (wide[len(wide) - k :] - wide[max(0, len(wide) - k - 1)]).mean(dim=0)
