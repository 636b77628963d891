"""Turn readings into log p-values, with a continuous tail.

Conformal p-values of m images are at least 1 / (m + 1): everything beyond the largest of m readings is tied.  Where
several readings are combined, how far beyond matters.  So with the readings ``r_1 ≤ … ≤ r_m`` of in-distribution
images, higher is more unusual,

* at ``r_i`` the p-value is ``(m + 1 − i) / (m + 1)``, and its logarithm is linear in between; below ``r_1`` it is as at
  ``r_1``;
* beyond ``r_m`` it is ``exp(−(r − r_m) / s) / (m + 1)``: an exponential tail of scale s, the mean excess of the largest
  readings over the one below them (the maximum-likelihood scale of an exponential tail; Embrechts et al., Modelling
  Extremal Events, 1997, section 6.2).

They rank and weigh, and promise nothing: the score that is made of them is calibrated again.

Shapes: B images, G gates, m in-distribution images.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def log_p_pieces(
    ascending: Float[Tensor, "gates m"], scales: Float[Tensor, " gates"]
) -> Float[Tensor, "gates m_plus_1 3"]:
    """The log p-value of each gate as straight lines, float64.

    Line i holds for readings with i of ``ascending`` at or below them: where it starts, its value there, its slope.

    Args:
        ascending: In-distribution readings of each gate, sorted.
        scales: s of each gate, positive.
    """
    gates, m = ascending.shape
    knots = ascending.double()
    ranks = torch.arange(m, dtype=torch.float64, device=knots.device)
    values = torch.log((m - ranks) / (m + 1)).expand(gates, m)
    rises = values.diff(dim=1) / knots.diff(dim=1)
    rises = rises.nan_to_num(neginf=0.0)  # No reading lies between equal ones.
    slopes = torch.cat([rises, -1 / scales.double()[:, None]], dim=1)
    flat = torch.stack([knots[:, :1], values[:, :1], torch.zeros_like(knots[:, :1])], dim=2)
    return torch.cat([flat, torch.stack([knots, values, slopes], dim=2)], dim=1)


def log_p_values(
    ascending: Float[Tensor, "gates m"],
    pieces: Float[Tensor, "gates m_plus_1 3"],
    readings: Float[Tensor, "gates batch"],
) -> Float[Tensor, "gates batch"]:
    """Logarithms of the p-values, nats, float64: continuous and falling in each reading; NaN for NaN.

    In float32 a score would depend on where in a batch its image is.

    Args:
        ascending: As in :func:`log_p_pieces`.
        pieces: From there.
        readings: Of the images to test, contiguous, of the type of ``ascending``.
    """
    lines = torch.searchsorted(ascending, readings, right=True)
    start, value, slope = pieces.gather(1, lines[..., None].expand(-1, -1, 3)).unbind(2)
    return torch.addcmul(value, slope, readings - start)
