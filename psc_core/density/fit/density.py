"""Fit a density to z: PCA, class moments, shrinkage where images are few; all in float64.

Three coordinate systems, each one matrix product away from the one before; the third is served:

    ``y = (z − mean) U``            principal components, orthonormal
    ``x = y diag(λ^(−1/2))``        unit total variance in every component
    ``w = x V``                     identity pooled within-class covariance, ``V = Σ_W(x)^(−1/2)``

Class moments are the paper's: ``μ_c``, ``Σ_c`` with denominator ``n_c − 1`` and priors ``n_c / n``; a change
of coordinates does not alter the fit.  Two departures apply only where the paper's estimate is poor:

* With fewer than :data:`IMAGES_PER_COMPONENT` images per component, covariances are shrunk (OAS) towards a multiple of
  the identity: in w that is the pooled covariance, in x the total one.
* Eigenvalues below 10⁻⁶ are clamped to it, that is, deviations a thousand times smaller than the pooled (in w) or the
  total ones (in x), as identical images or complete collapse give.

The fit's record says how often either happened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.bundle.module import Record
from psc_core.density import kind_of
from psc_core.density.base import Density
from psc_core.density.fit.pca import PCA, fit_pca
from psc_core.density.gaussian import ClasswiseDensity, RelativeDensity
from psc_core.numerics import linalg
from psc_core.numerics.matrix import FeatureMatrix, as_matrix, check_features

IMAGES_PER_COMPONENT: Final = 10
"""Minimum number of images per component for a covariance that is not shrunk."""

WHITENER_ELEMENTS: Final = 1 << 26
"""Maximum K × P × P for the automatic choice of P (256 MiB of float32)."""


def fit_density(
    z: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    num_classes: int,
    kind: str = "gda",
    pca: int | None = None,
    class_names: Sequence[str] | None = None,
) -> Density:
    """Fit a feature density.

    Args:
        z: Features of every labelled example, of the kind that the density reads (:attr:`Density.reads`), any float
            type, read in blocks.
        labels: Class index of each labelled example.
        num_classes: K.
        kind: One of :data:`psc_core.density.DENSITIES`.
        pca: Principal components to keep.  ``None`` chooses (see :mod:`.pca`), at most n − K and, with a covariance
            for each class, so many that K · P² stays under :data:`WHITENER_ELEMENTS`.
        class_names: Names for messages.

    Returns:
        A float32 module on the device of ``z``.

    Raises:
        UsageError: An unknown kind.
        FitError: Features that are not finite or all equal, a class with fewer than two labelled examples,
            or a ``pca`` beyond the rank.
    """
    family = kind_of(kind)
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(num_classes)))
    counts = check_features(z, labels, class_names=names, minimum=2)
    z = as_matrix(z)
    if family.unit_length:
        z = z.map(functional.normalize, z.shape[1], z.dtype)
    classwise = issubclass(family, ClasswiseDensity)
    limit = len(z) - num_classes
    if classwise:
        limit = min(limit, math.isqrt(WHITENER_ELEMENTS // num_classes))
    limit = min(limit, family.maximum_components or limit)
    projection = fit_pca(z, kept=pca, limit=max(1, limit), minimum_variance=family.minimum_variance)

    members = torch.split(labels.argsort(stable=True), counts.tolist())
    x = projection.whiten(z)
    pooled = pool_classes(x, members)
    root = pooled.inverse.root
    tensors = {"mean": projection.mean, "basis": projection.whitening @ root}
    record: Record = {
        "components": len(projection.variances),
        "explained_variance": projection.explained,
        "pooled_shrinkage": pooled.shrinkage,
        "lifted_eigenvalues": pooled.inverse.n_clamped,
        "largest_lift": pooled.inverse.largest_increase,
    }
    constants = (counts / len(z)).double().log() - 0.5 * volume(projection) - 0.5 * pooled.inverse.log_det
    if classwise:
        own = class_covariances(x.map(lambda part: part @ root, x.shape[1], torch.float64), members)
        tensors |= {"whiteners": own.whiteners, "offsets": own.offsets, "constants": constants - 0.5 * own.log_dets}
        record |= {
            "lifted_eigenvalues": pooled.inverse.n_clamped + own.n_clamped,
            "largest_lift": max(pooled.inverse.largest_increase, own.largest_increase),
            "shrunk_classes": sum(intensity > 0 for intensity in own.shrinkage),
            "mean_shrinkage": sum(own.shrinkage) / num_classes,
        }
    else:
        tensors |= {"centres": pooled.means @ root, "constants": constants}
    if family is RelativeDensity:
        # x has zero mean and identity covariance over all images, and x = w V⁻¹
        tensors["background"] = torch.linalg.inv(root)
        tensors["background_constant"] = torch.tensor(-0.5 * volume(projection), device=z.device)
    return family(tensors, record=record).to(z.device)


def volume(projection: PCA) -> float:
    """``P log 2π + log det`` of the total covariance: −2 × the log-density at its centre."""
    return len(projection.variances) * math.log(2 * math.pi) + projection.variances.log().sum().item()


class PooledCovariance(NamedTuple):
    """Class means in x, and the inverse root V of the pooled within-class covariance with its shrinkage intensity."""

    means: Float[Tensor, "classes kept"]
    inverse: linalg.InverseRoot
    shrinkage: float


def pool_classes(x: FeatureMatrix, members: Sequence[Int[Tensor, " _"]]) -> PooledCovariance:
    """Moments over all classes; ``members`` are the positions of each class in x."""
    means = torch.stack([linalg.mean_of_rows(x.take(own)) for own in members])
    scatter = means.new_zeros(x.shape[1], x.shape[1])
    for own, mean in zip(members, means, strict=True):
        scatter += linalg.scatter_about(x.take(own), mean)
    degrees_of_freedom = len(x) - len(members)
    covariance, shrinkage = shrink(scatter / degrees_of_freedom, degrees_of_freedom)
    return PooledCovariance(means, linalg.inverse_root(covariance, scale=1.0), shrinkage)


class ClassCovariances(NamedTuple):
    """``S_k^(−1/2)``, ``−S_k^(−1/2) m_k`` and ``log det S_k``, with what was clamped and each shrinkage intensity."""

    whiteners: Float[Tensor, "classes kept kept"]
    offsets: Float[Tensor, "classes kept"]
    log_dets: Float[Tensor, " classes"]
    shrinkage: list[float]
    n_clamped: int
    largest_increase: float


def class_covariances(w: FeatureMatrix, members: Sequence[Int[Tensor, " _"]]) -> ClassCovariances:
    """Moments of each class, float64 for one class at a time; ``members`` as in :func:`pool_classes`."""
    classes, kept = len(members), w.shape[1]
    whiteners = torch.empty(classes, kept, kept, device=w.device)
    offsets = torch.empty(classes, kept, device=w.device)
    log_dets = torch.empty(classes, dtype=torch.float64, device=w.device)
    intensities, n_clamped, largest_increase = [], 0, 0.0
    for k, own in enumerate(members):
        mean = linalg.mean_of_rows(w.take(own))
        degrees_of_freedom = len(own) - 1
        scatter = linalg.scatter_about(w.take(own), mean)
        covariance, intensity = shrink(scatter / degrees_of_freedom, degrees_of_freedom)
        inverse = linalg.inverse_root(covariance, scale=1.0)
        whiteners[k], offsets[k], log_dets[k] = inverse.root, -inverse.root @ mean, inverse.log_det
        intensities.append(intensity)
        n_clamped += inverse.n_clamped
        largest_increase = max(largest_increase, inverse.largest_increase)
    return ClassCovariances(whiteners, offsets, log_dets, intensities, n_clamped, largest_increase)


def shrink(covariance: Float[Tensor, "d d"], degrees_of_freedom: int) -> tuple[Float[Tensor, "d d"], float]:
    """OAS where there are fewer than :data:`IMAGES_PER_COMPONENT` degrees of freedom for each component."""
    if degrees_of_freedom >= IMAGES_PER_COMPONENT * covariance.shape[0]:
        return covariance, 0.0
    return linalg.oas_shrinkage(covariance, degrees_of_freedom)
