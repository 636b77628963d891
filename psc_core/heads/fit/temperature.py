"""Temperature scaling (Guo et al. 2017): one number T, by validation NLL, that logits are divided by."""

from __future__ import annotations

import math
from typing import Final

from jaxtyping import Float, Int
from torch import Tensor

from psc_core.numerics.matrix import chunk_rows

TEMPERATURES: Final = (0.01, 100.0)
"""Range of T; logits that are right on every validation image would ask for 0 (and get any T of no loss)."""


def fit_temperature(
    logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], *, prior_images: float = 0.0, start: float = 1.0
) -> float:
    """T that minimises the NLL of softmax(f / T), within :data:`TEMPERATURES`.

    The NLL is convex in β = 1/T, with slope Σ (E_p[f] − f_label) and curvature Σ Var_p[f]: Newton steps, and halving
    of the bracket in log β where a step leaves it.

    Args:
        logits: f.
        labels: Class index of each row.
        prior_images: a of a Gamma prior on β with its mode at 1, which adds a (β − 1 − log β) to the sum of the NLL.
            Without it, few images that are all right ask for boundless certainty.
        start: T to begin with; near the answer it spares steps.
    """
    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    beta = 1 / start
    for _ in range(100):
        slope, curvature = _nll_derivatives(logits, labels, beta)
        slope += prior_images * (1 - 1 / beta)
        curvature += prior_images / beta**2
        if slope == 0:
            break
        low, high = (low, beta) if slope > 0 else (beta, high)
        newton = beta - slope / curvature if curvature > 0 else math.inf
        previous, beta = beta, newton if low < newton < high else math.sqrt(low * high)
        if abs(beta - previous) <= 1e-8 * beta:
            break
    return 1 / beta


def _nll_derivatives(logits: Tensor, labels: Tensor, beta: float) -> tuple[float, float]:
    slope = curvature = 0.0
    for rows in chunk_rows(*logits.shape):
        f = logits[rows].double()
        p = (beta * f).softmax(1)
        mean = (p * f).sum(1)
        slope += float((mean - f.gather(1, labels[rows, None]).squeeze(1)).sum())
        curvature += float((p * (f - mean[:, None]).square()).sum())
    return slope, curvature
