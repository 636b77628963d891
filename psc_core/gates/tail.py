"""Turn readings into log p-values, with a continuous tail.

The conformal p-value among m images is at least 1 / (m + 1), so all readings beyond the largest of m are tied.  Where
several readings are combined, their distance beyond it matters.  So with the readings ``r_1 ≤ … ≤ r_m`` of
in-distribution images, where higher is more unusual,

* at ``r_i`` the p-value is ``(m + 1 − i) / (m + 1)``, and its logarithm is linear in between; below ``r_1`` it is as
  at ``r_1``;
* beyond ``r_m`` it is ``exp(−(r − r_m) / s) / (m + 1)``: an exponential tail of scale s, the mean excess of the largest
  readings over the next smaller one (the maximum-likelihood scale of an exponential tail; Embrechts et al., Modelling
  Extremal Events, 1997, section 6.2).

These p-values only rank and weigh, and guarantee nothing: the score made of them is calibrated again.

Shapes: B images, G gates, m in-distribution images.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def log_p_pieces(
    ascending: Float[Tensor, "gates m"], scales: Float[Tensor, " gates"]
) -> Float[Tensor, "gates m_plus_1 3"]:
    """Return the log p-value of each gate as straight lines, float64.

    Line i holds for readings with i of ``ascending`` at or below them; it is given by its start, value there and slope.

    Args:
        ascending: The sorted in-distribution readings of each gate.
        scales: The scale s of each gate, positive.
    """
    gates, m = ascending.shape
    knots = ascending.double()
    ranks = torch.arange(m, dtype=torch.float64, device=knots.device)
    values = torch.log((m - ranks) / (m + 1)).expand(gates, m)
    rises = values.diff(dim=1) / knots.diff(dim=1)
    rises = rises.nan_to_num(neginf=0.0)  # no reading lies between equal knots
    slopes = torch.cat([rises, -1 / scales.double()[:, None]], dim=1)
    flat = torch.stack([knots[:, :1], values[:, :1], torch.zeros_like(knots[:, :1])], dim=2)
    return torch.cat([flat, torch.stack([knots, values, slopes], dim=2)], dim=1)


def log_p_values(
    ascending: Float[Tensor, "gates m"],
    pieces: Float[Tensor, "gates m_plus_1 3"],
    readings: Float[Tensor, "gates batch"],
) -> Float[Tensor, "gates batch"]:
    """Return log p-values in nats, float64: continuous and decreasing in each reading; NaN for NaN.

    In float32 a score would depend on the position of its image in a batch.

    Args:
        ascending: The readings given to :func:`log_p_pieces`.
        pieces: The lines from :func:`log_p_pieces`.
        readings: The readings of the images to test, contiguous, of the same dtype as ``ascending``.
    """
    lines = torch.searchsorted(ascending, readings, right=True)
    start, value, slope = pieces.gather(1, lines[..., None].expand(-1, -1, 3)).unbind(2)
    return torch.addcmul(value, slope, readings - start)
