"""Temperature scaling (Guo et al. 2017, equation 9) as it is commonly used: T alone minimises the validation NLL.

Base predictions of a fitted model have another T, which has a prior and must gain more than its error
(:func:`psc_core.tasks.classification.fit.posterior.choose_temperature`).
"""

from __future__ import annotations

import math

from jaxtyping import Float, Int
from torch import Tensor

from psc_core.numerics.matrix import chunk_rows
from psc_core.tasks.classification.fit.posterior import TEMPERATURES


def fit_temperature(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Return the T that minimises the NLL of softmax(f / T), within :data:`TEMPERATURES`.

    The NLL is convex in β = 1/T, with slope Σ (E_p[f] − f_label) and curvature Σ Var_p[f], so this takes Newton steps,
    with bisection in log β if a step leaves the bracket.

    Args:
        logits: The logits f.
        labels: The class index of each labelled example.
    """
    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    beta = 1.0
    for _ in range(100):
        slope, curvature = nll_derivatives(logits, labels, beta)
        if slope == 0:
            break
        low, high = (low, beta) if slope > 0 else (beta, high)
        newton = beta - slope / curvature if curvature > 0 else math.inf
        previous, beta = beta, newton if low < newton < high else math.sqrt(low * high)
        if abs(beta - previous) <= 1e-8 * beta:
            break
    return 1 / beta


def nll_derivatives(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], beta: float) -> tuple[float, float]:
    """Return the slope and the curvature in β of the summed NLL of softmax(β f)."""
    slope = curvature = 0.0
    for chunk in chunk_rows(*logits.shape):
        f = logits[chunk].double()
        p = (beta * f).softmax(1)
        mean = (p * f).sum(1)
        slope += float((mean - f.gather(1, labels[chunk, None]).squeeze(1)).sum())
        curvature += float((p * (f - mean[:, None]).square()).sum())
    return slope, curvature
