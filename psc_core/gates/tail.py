"""From readings to log p-values, with a continuous tail.

Conformal p-values of n images are at least 1 / (n + 1): everything beyond the largest of n readings is tied.  Where
several readings are combined, how far beyond matters.  So with the readings ``r_1 ≤ … ≤ r_n`` of in-distribution
images, higher is more unusual,

* at ``r_i`` the p-value is ``(n + 1 − i) / (n + 1)``, and its logarithm is linear in between; below ``r_1`` it is as at
  ``r_1``;
* beyond ``r_n`` it is ``exp(−(r − r_n) / m) / (n + 1)``: an exponential tail of scale m, the mean excess of the largest
  readings over the one below them (the maximum-likelihood scale of an exponential tail; Embrechts et al., Modelling
  Extremal Events, 1997, section 6.2).

They rank and weigh, and promise nothing: the score that is made of them is calibrated again.

Shapes: B images, G gates, n in-distribution images.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def log_p_values(
    ascending: Float[Tensor, "gates n"], scales: Float[Tensor, " gates"], readings: Float[Tensor, "batch gates"]
) -> Float[Tensor, "batch gates"]:
    """Logarithms of the p-values of this module, nats, float64: continuous and falling in each reading; NaN for NaN.

    Args:
        ascending: In-distribution readings of each gate, sorted.
        scales: m of each gate, positive.
        readings: Of the images to test.
    """
    n = ascending.shape[1]
    tested = readings.T.contiguous()
    below = torch.searchsorted(ascending, tested, right=True)  # readings at most this one
    left, right = (below - 1).clamp(min=0), below.clamp(max=n - 1)
    tested = tested.double()  # float32 would make a score depend on where in a batch its image is
    start, end = ascending.gather(1, left).double(), ascending.gather(1, right).double()
    fraction = ((tested - start) / (end - start)).where(end > start, 0.0).clamp(0, 1)
    log_left, log_right = (torch.log((n - rank.double()) / (n + 1)) for rank in (left, right))
    inside = torch.lerp(log_left, log_right, fraction)
    beyond = -math.log(n + 1) - (tested - ascending[:, -1:]) / scales[:, None]
    return torch.where(below == n, beyond, inside).T
