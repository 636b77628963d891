"""Choose the fraction of the pooled covariance in that of each class, by held-out likelihood.

In w (:mod:`.density`) the pooled covariance is the identity, and class k has

    ``Σ_k = (1 − t) S_k + t I``

with its own S_k: t = 0 is one covariance for each class, t = 1 the same one for all, and in between lies Friedman's
regularised discriminant (1989).  Of :data:`TIED_WEIGHTS` the t is chosen under which images that nothing was fitted to
are most likely, each under its own class.  Training images would choose too small a t: the network was fitted to them,
so they lie closer to their means than any later image will.

Shapes: P = kept components.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.numerics import linalg

TIED_WEIGHTS: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95, 1.0)
"""Values of t that are compared, ascending."""


class ClassMoments(NamedTuple):
    """Mean and covariance of one class, float64."""

    mean: Float[Tensor, " P"]
    covariance: Float[Tensor, "P P"]


def between(class_covariance: Float[Tensor, "P P"], tied_weight: float) -> Float[Tensor, "P P"]:
    """Return ``(1 − t) S_k + t I``."""
    tied = torch.eye(len(class_covariance), dtype=class_covariance.dtype, device=class_covariance.device)
    return (1 - tied_weight) * class_covariance + tied_weight * tied


def log_likelihoods(of_class: ClassMoments, images: Float[Tensor, "m P"]) -> Float[Tensor, " weights"]:
    """Return ``Σ_i log N(w_i; m_k, Σ_k)`` over held-out images of the class for every t, up to a constant, nats."""
    values, vectors = linalg.eigh(of_class.covariance)
    squares = ((images.double() - of_class.mean) @ vectors).square().sum(0)
    weights = torch.tensor(TIED_WEIGHTS, dtype=torch.float64, device=values.device)[:, None]
    variances = ((1 - weights) * values + weights).clamp(min=linalg.EIGENVALUE_FLOOR)
    return -0.5 * (squares / variances + len(images) * variances.log()).sum(1)


def choose_tied_weight(classes: Iterable[tuple[ClassMoments, Float[Tensor, "_ P"]]]) -> float:
    """Return the t under which the held-out images of all classes are most likely, on a tie the largest."""
    total = sum(log_likelihoods(moments, images).cpu() for moments, images in classes)
    return max(zip(total.tolist(), TIED_WEIGHTS, strict=True))[1]  # type: ignore[union-attr]
