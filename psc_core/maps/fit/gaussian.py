"""Fit the Gaussian of a position, and the distances of its grey levels.

Channels are scaled to unit variance; a channel below :data:`.DEAD_UNIT` of the layer's root mean square is scaled as if
it had that much.  Of the components of the correlation, C = U diag(λ) Uᵀ, the half of least variance is kept, at most
:data:`MAX_COMPONENTS`:

    A = diag(1/σ) U_kept diag(λ_kept^(−1/2))

Directions in which in-distribution images hardly vary detect anomalous images best (Rippel, Mertens & Merhof 2021),
because all images differ in the leading directions.  Components whose variance is only rounding, below
:data:`.EIGENVALUE_FLOOR` or the squared resolution of the features, are dropped.

A level's threshold is the distance that a fraction t of in-distribution positions reaches.  Of m sorted readings
``r_1 ≤ … ≤ r_m`` the i-th has ``t_i = (m + 1 − i) / (m + 1)``, and ``log t`` is linear in between; beyond ``r_m`` it
falls with the mean excess of the largest, :data:`.TAIL_FRACTION`, like the tails of the gates.  A threshold lies
:data:`DISTANCE_ROUNDING` above its reading, so that equal distances, such as those of a black background, have the same
level in spite of rounding.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError
from psc_core.fitted import Record
from psc_core.maps.fit.moments import LayerMoments
from psc_core.maps.layer_map import DECADES, LEVELS, PositionDensity
from psc_core.numerics.linalg import DEAD_UNIT, EIGENVALUE_FLOOR, eigh, rounding_of
from psc_core.numerics.tail import TAIL_FRACTION, tail_excess

MAX_COMPONENTS: Final = 128
"""Maximum number of components, so that a map costs a few hundredths of the network."""

DISTANCE_ROUNDING: Final = 1e-4
"""Maximum relative difference between two ways to compute a distance."""


def fit_positions(moments: LayerMoments) -> PositionDensity:
    """Fit the density of a position; its thresholds are 0 until :func:`with_levels` sets them.

    Raises:
        FitError: If features are not finite, or the same at all positions.
    """
    variance = moments.covariance.diagonal()
    if not (bool(moments.mean.isfinite().all()) and bool(variance.isfinite().all())):
        raise FitError("expected finite features for a map; check the weights, or use --precision fp32")
    scale = variance.mean().sqrt()
    if bool(scale <= rounding_of(moments.mean.square().mean().sqrt())):
        raise FitError("expected features that differ between positions for a map, got the same at all")
    std = torch.maximum(variance.sqrt(), DEAD_UNIT * scale)
    values, vectors = eigh(moments.covariance / std[:, None] / std)
    exact = values > max(EIGENVALUE_FLOOR, moments.resolution**2)
    values, vectors = values[exact], vectors[:, exact]
    kept = min(math.ceil(len(variance) / 2), MAX_COMPONENTS, len(values))
    whitener = vectors[:, len(values) - kept :] * values[len(values) - kept :].rsqrt() / std[:, None]
    record: Record = {"vectors": moments.vectors, "resolved": len(values)}
    tensors = {"mean": moments.mean, "whitener": whitener, "thresholds": torch.zeros(LEVELS)}
    return PositionDensity(tensors, record=record)


def with_levels(density: PositionDensity, distances: Float[Tensor, " m"]) -> PositionDensity:
    """Return the density with grey levels fitted to the squared distances of m in-distribution positions."""
    tensors = {**density.state_dict(), "thresholds": thresholds(distances).to(density.mean.device)}
    return PositionDensity(tensors, record={**density.record, "readings": len(distances)}).to(density.mean.device)


def thresholds(readings: Float[Tensor, " m"]) -> Float[Tensor, " levels"]:
    """Return the distance of each grey level above black, ascending, float64."""
    ordered = readings.double().sort().values.cpu().numpy()
    m = len(ordered)
    log_fractions = -DECADES * math.log(10) / LEVELS * np.arange(1, LEVELS + 1)
    log_ranks = np.log((m - np.arange(m)) / (m + 1))
    inside = np.interp(-log_fractions, -log_ranks, ordered)
    k = max(1, round(TAIL_FRACTION * m))
    excess = float(tail_excess(torch.from_numpy(ordered), k))
    beyond = np.maximum(0.0, -math.log(m + 1) - log_fractions) * excess
    return torch.from_numpy((1 + DISTANCE_ROUNDING) * (inside + beyond))
