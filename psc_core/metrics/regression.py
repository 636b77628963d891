r"""Metrics of predictions of a number: its error, and the normal distribution N(μ, σ²) as its forecast.

All in float64; y is the true number, n images.

    RMSE = √(mean (y − μ)²)
    R²   = 1 − Σ (y − μ)² / Σ (y − ȳ)²
    NLL  = mean ½ [((y − μ)/σ)² + log(2π σ²)]                                    nats
    CRPS = mean σ [w (2Φ(w) − 1) + 2φ(w) − 1/√π],   w = (y − μ)/σ               (Gneiting & Raftery 2007, equation 21)
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.metrics.inputs import GUESSING_DEVIATIONS
from psc_core.numerics.explained import r_squared


def rmse(mean: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    """Return the root mean squared error, in the target's unit."""
    return float((values.double() - mean.double()).square().mean().sqrt())


def r2(mean: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    """Return R², the explained fraction of the variance; see :func:`psc_core.numerics.explained.r_squared`."""
    return r_squared((values.double() - mean.double()).square(), values.double())


def better_than_guessing(mean: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> bool:
    """Return whether predictions rise with the numbers more than in random order, by their correlation.

    Under a random order it has mean 0 and variance 1 / (n − 1).  Where all numbers are equal nothing can be said, and
    the answer is yes.
    """
    y, mu = (each.double() - each.double().mean() for each in (values, mean))
    if len(y) < 2 or bool((values == values[0]).all()):
        return True
    scale = float(y.norm() * mu.norm())
    return scale > 0 and float(y @ mu) / scale > GUESSING_DEVIATIONS / math.sqrt(len(y) - 1)


def nll(mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    """Return the mean negative log-likelihood of the normal distribution, in nats."""
    w = (values.double() - mean.double()) / deviation.double()
    return float((0.5 * (w.square() + math.log(2 * math.pi)) + deviation.double().log()).mean())


def crps(mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    """Return the continuous ranked probability score of the normal distribution, in the target's unit."""
    sigma = deviation.double()
    w = (values.double() - mean.double()) / sigma
    density = torch.exp(-0.5 * w.square()) / math.sqrt(2 * math.pi)
    return float((sigma * (w * torch.erf(w / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))).mean())
