"""The interface of every density: from z (B, D) to log-densities (B,) in nats, with explanations on request.

Shapes: B images, K classes, D = dim of z, P = kept components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.density import DENSITIES
from psc_core.fitted import Fitted, restore


class DensityOutput(NamedTuple):
    """The log-densities of a batch, nats."""

    log_density: Float[Tensor, " batch"]  # log p, the logsumexp of class_log_joint
    class_log_joint: Float[Tensor, "batch classes"]  # log π_k + log N(y; μ_k, Σ_k)


class DensityExplanation(NamedTuple):
    """Where the images of a batch lie relative to the classes."""

    class_distances: Float[Tensor, "batch classes"]  # Mahalanobis, in standard deviations
    nearest_class: Int[Tensor, " batch"]  # index of the class at the smallest distance
    component_deviation: Float[Tensor, "batch kept"]  # whitened difference from it; its norm is the distance


class Density(Fitted):
    """Base of the densities, with ``mean`` (D,), ``basis`` (D, P) and ``constants`` (K,) as in :mod:`.gaussian`.

    Attributes:
        reads: The input: the projected features z, or the candidate layer's features averaged over positions.
        unit_length: True if z is divided by its Euclidean norm first.
        minimum_variance: Fraction of the largest variance above which the automatic choice keeps a component;
            ``None``: it keeps the components that explain 99 % of the variance.
        maximum_components: Largest number of components that the automatic choice keeps; ``None``: as many as memory
            allows.
        has_class_covariances: Whether each class has a covariance of its own, so that memory limits the automatic
            choice of components.
        tied_by_held_out: Whether held-out examples choose how much of the pooled covariance goes into the covariance of
            each class.
    """

    # Float64 up to the difference from a class mean, which cancels where classes are tight.
    in_float64: ClassVar[frozenset[str]] = frozenset({"mean", "basis", "centres"})

    reads: ClassVar[Literal["z", "pooled"]] = "z"
    unit_length: ClassVar[bool] = False
    minimum_variance: ClassVar[float | None] = None
    maximum_components: ClassVar[int | None] = None
    has_class_covariances: ClassVar[bool] = False
    tied_by_held_out: ClassVar[bool] = False

    mean: Tensor
    basis: Tensor
    constants: Tensor

    def coordinates(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch kept"]:
        """Return w, in which the pooled within-class covariance is the identity, in the type of ``mean``."""
        z = z.to(self.mean.dtype)
        if self.unit_length:
            z = functional.normalize(z)
        return (z - self.mean) @ self.basis

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return the Mahalanobis distance to every class, in standard deviations."""
        raise NotImplementedError

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        """Return the whitened difference of each image from the mean of its class in ``classes``."""
        raise NotImplementedError

    def forward(self, z: Float[Tensor, "batch dim"]) -> DensityOutput:
        """Return the log-densities of a batch, nats."""
        joint = self.class_log_joint(self.coordinates(z))
        # Not the log of a sum: float32 holds nothing below e^−103, and densities can be far smaller.
        return DensityOutput(joint.logsumexp(dim=1), joint)

    def class_log_joint(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return ``log π_k + log N_k``, nats."""
        distances = self.class_distances(w)
        return torch.addcmul(self.constants, distances, distances, value=-0.5)

    def explain(self, z: Float[Tensor, "batch dim"]) -> DensityExplanation:
        """Return every image's distances, its nearest class, and how it deviates from that along each component."""
        return self.explain_at(self.coordinates(z))

    def explain_at(self, w: Float[Tensor, "batch kept"]) -> DensityExplanation:
        """Return the explanation of images with these :meth:`coordinates`."""
        distances = self.class_distances(w)
        nearest = distances.argmin(dim=1)
        return DensityExplanation(distances, nearest, self.deviation(w, nearest))


def restore_density(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Density:
    """Return the density with this ``config()`` and ``state_dict()``.

    Raises:
        BundleError: If the kind is unknown, or the tensors do not fit it.
    """
    return restore(DENSITIES, config, state)
