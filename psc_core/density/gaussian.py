"""Gaussian feature densities: ``log p(y) = logsumexp_k (log π_k + log N(y; μ_k, Σ_k))`` in nats.

The paper's feature density (appendix B.2, equation 2).  ``y`` is the PCA projection of z
(:mod:`psc_core.density.fit.pca`), π_k the class proportions.  All densities work in the coordinates

    ``w = (z − mean) @ basis``

in which the within-class covariance pooled over classes is the identity, whatever the units of z.  Everything up to the
difference ``w − m_k`` from a class mean is float64, because it cancels where classes are tight; what follows does not,
and is float32.  The constants hold the change of variables: ``log p`` stays the log-density of y.
With ``m_k`` the class means and ``S_k`` the class covariances in these coordinates:

=================  =================================================================================================
``gda``            one covariance for each class: squared distance ``‖S_k^(−1/2) (w − m_k)‖²``
``gda++``          the same after ``z ← z / ‖z‖``
``pooled++``       ``gda++`` of the candidate layer's features averaged over positions, not of z; at most 512 components
``tied``           one covariance for all classes: ``‖w − m_k‖²``
``mahalanobis++``  the same after ``z ← z / ‖z‖`` (Müller & Hein 2025, who take the smallest distance as their score)
``rmd``            relative Mahalanobis (Ren et al. 2021): the ``tied`` log-density minus the log-density of one
                   Gaussian fitted to all images, a log-ratio in nats; the same is subtracted from ``log π_k + log N_k``
=================  =================================================================================================

Shapes: B images, K classes, D = dim of z, P = kept components.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.density.base import Density

SERVE_ELEMENTS: Final = 1 << 25
"""Largest B × K × P block of differences (256 MiB of float64); larger batches are split."""


class ClasswiseDensity(Density):
    """One covariance for each class; ``centres`` (K, P) are the class means m_k, ``whiteners`` (K, P, P) S_k^(−1/2)."""

    kind = "gda"
    has_class_covariances = True
    layout: ClassVar = {
        "mean": ("dim",),
        "basis": ("dim", "kept"),
        "centres": ("classes", "kept"),
        "whiteners": ("classes", "kept", "kept"),
        "constants": ("classes",),
    }
    centres: Tensor
    whiteners: Tensor

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return Mahalanobis distances, by one batched matrix product (P → P) with an entry for each class."""
        batch = max(1, SERVE_ELEMENTS // self.centres.numel())
        if len(w) > batch:
            return torch.cat([self.class_distances(part) for part in torch.split(w, batch)])
        # Float64 up to here, where it cancels; the product does not, and float32 takes half the memory.
        differences = (w - self.centres[:, None]).float()
        distances: Tensor = torch.linalg.vector_norm(differences @ self.whiteners.mT, dim=2)
        return distances.T

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        """Return ``S_k^(−1/2) (w − m_k)``, k from ``classes``."""
        return torch.einsum("bpq,bq->bp", self.whiteners[classes], (w - self.centres[classes]).float())


class UnitLengthDensity(ClasswiseDensity):
    """:class:`ClasswiseDensity` of z / ‖z‖."""

    kind = "gda++"
    unit_length = True
    tied_by_held_out = True


class PooledDensity(UnitLengthDensity):
    """:class:`UnitLengthDensity` of features averaged over positions."""

    kind = "pooled++"
    reads = "pooled"
    minimum_variance = 1e-6
    maximum_components = 512


class TiedDensity(Density):
    """One covariance shared by all classes; ``centres`` (K, P) are the class means m_k."""

    kind = "tied"
    layout: ClassVar = {
        "mean": ("dim",),
        "basis": ("dim", "kept"),
        "centres": ("classes", "kept"),
        "constants": ("classes",),
    }
    centres: Tensor

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return ``‖w − m_k‖`` from differences; ‖w‖² − 2 w·m + ‖m‖² would cancel where classes are tight."""
        # PyTorch's default expands the square where there are more than 25 points.
        return torch.cdist(w, self.centres, compute_mode="donot_use_mm_for_euclid_dist").float()

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        """Return ``w − m_k``, k from ``classes``."""
        return (w - self.centres[classes]).float()


class UnitLengthTiedDensity(TiedDensity):
    """:class:`TiedDensity` of z / ‖z‖."""

    kind = "mahalanobis++"
    unit_length = True


class RelativeDensity(TiedDensity):
    """``tied`` minus the log-density of one Gaussian for all images; ``background`` (P, P) whitens w under it."""

    kind = "rmd"
    layout: ClassVar = {**TiedDensity.layout, "background": ("kept", "kept"), "background_constant": ()}
    background: Tensor
    background_constant: Tensor

    def class_log_joint(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return ``log π_k + log N_k − log N_background``, nats.

        The difference is taken in float64: far from the data both terms are large and nearly equal.
        """
        wide = w.double()
        background = self.background_constant - 0.5 * (wide @ self.background.double()).square().sum(dim=1)
        distances = torch.cdist(wide, self.centres.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
        return (self.constants - 0.5 * distances - background[:, None]).float()
