"""Fit a density to z: PCA, class moments, shrinkage where images are few; all in float64.

Three coordinate systems, each one matrix product away from the one before; the third is served:

    ``y = (z − mean) U``            principal components, orthonormal
    ``x = y diag(λ^(−1/2))``        unit total variance in every component
    ``w = x V``                     identity pooled within-class covariance, ``V = Σ_W(x)^(−1/2)``

Class moments are the paper's: ``μ_c``, ``Σ_c`` with denominator ``n_c − 1`` and priors ``n_c / n``; a change
of coordinates does not alter the fit.  An image with several labels weighs in the moments as often as it is labelled,
but is one observation: with m_c images of n_c labelled examples, ``Σ_c`` is the mean square times ``m_c / (m_c − 1)``.
Two departures apply only where the paper's estimate is poor:

* With fewer than ten images (beyond one a class) per component, covariances are shrunk
  (:func:`psc_core.numerics.linalg.covariance`) towards a multiple of the identity: in w that is the pooled covariance,
  in x the total one.  Where held-out images are given, these choose how much of the pooled covariance each class takes
  (:mod:`.tied_weight`), whatever the number of images.
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

from psc_core.density import kind_of
from psc_core.density.base import Density
from psc_core.density.fit.extend import EXAMPLES
from psc_core.density.fit.pca import fit_pca
from psc_core.density.fit.tied_weight import ClassMoments, between, choose_tied_weight
from psc_core.density.gaussian import ClasswiseDensity, RelativeDensity
from psc_core.fitted import Record
from psc_core.numerics import linalg
from psc_core.numerics.matrix import FeatureMatrix, as_matrix, check_features, images_of_classes

WHITENER_ELEMENTS: Final = 1 << 26
"""Maximum K × P × P for the automatic choice of P (256 MiB of float32)."""


class HeldOut(NamedTuple):
    """Features of m labelled examples that nothing was fitted to."""

    z: Float[Tensor, "m dim"] | FeatureMatrix
    labels: Int[Tensor, " m"]


def fit_density(
    z: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    num_classes: int,
    kind: str = "gda",
    pca: int | None = None,
    class_names: Sequence[str] | None = None,
    images: Int[Tensor, " n"] | None = None,
    held_out: HeldOut | None = None,
) -> Density:
    """Fit a feature density.

    Args:
        z: Features of every labelled example, of the density's :attr:`Density.input_kind`, any float type, read in
            blocks.
        labels: Class index of each labelled example.
        num_classes: K.
        kind: One of :data:`psc_core.density.DENSITIES`.
        pca: Principal components to keep.  ``None`` chooses (see :mod:`.pca`), at most images − K and, with a
            covariance for each class, so many that K · P² stays under :data:`WHITENER_ELEMENTS`.
        class_names: Names for messages.
        images: Which image each labelled example shows; by default another one each.
        held_out: Features that nothing was fitted to; read where :attr:`.Density.tied_by_held_out`.

    Returns:
        A module on the device of ``z``.

    Raises:
        UsageError: An unknown kind.
        FitError: Features that are not finite or all equal, a class with fewer than two images,
            or a ``pca`` beyond the rank.
    """
    family = kind_of(kind)
    counts = check_features(z, labels, num_classes=num_classes, class_names=class_names, minimum=2, images=images)
    observed = counts if images is None else images_of_classes(images, labels, num_classes)
    n_images = len(z) if images is None else int(images.bincount().count_nonzero())
    z, feature_dtype = as_matrix(z), z.dtype
    z = _lengths(family, z)  # ``feature_dtype`` still tells how exact the features are.
    classwise = issubclass(family, ClasswiseDensity)
    limit = n_images - num_classes
    if classwise:
        limit = min(limit, math.isqrt(WHITENER_ELEMENTS // num_classes))
    limit = min(limit, family.maximum_components or limit)
    projection = fit_pca(
        z, kept=pca, limit=max(1, limit), minimum_variance=family.minimum_variance, feature_dtype=feature_dtype
    )

    # A stable sort, so that each fit adds the images of a class in the same order.
    members = torch.split(labels.argsort(stable=True), counts.tolist())
    x = projection.whiten(z)
    means = torch.stack([linalg.mean_of_rows(x.take(own)) for own in members])
    scatter = means.new_zeros(x.shape[1], x.shape[1])
    for own, mean in zip(members, means, strict=True):
        scatter += linalg.scatter_about(x.take(own), mean)
    # Labelled examples of one image are one observation; the K means take one degree of freedom each.
    covariance, shrinkage = linalg.covariance(scatter * (n_images / len(z)), n_images - num_classes)
    inverse = linalg.inverse_root(covariance)
    root = inverse.root
    # −2 × the log-density at the centre of one Gaussian for all images
    volume = len(projection.variances) * math.log(2 * math.pi) + projection.variances.log().sum().item()
    constants = (counts / len(z)).double().log() - 0.5 * volume - 0.5 * inverse.log_det
    tensors = {"mean": projection.mean, "basis": projection.whitening @ root, "constants": constants}
    record: Record = {
        EXAMPLES: len(z),
        "components": len(projection.variances),
        "explained_variance": projection.explained,
        "pooled_shrinkage": shrinkage,
        "clamped_eigenvalues": inverse.n_clamped,
        "largest_increase": inverse.largest_increase,
    }
    if classwise:
        w = x.map(lambda part: part @ root, x.shape[1], torch.float64)
        # Float32, and K × P × P the largest tensor: whiteners apply to differences, which no longer cancel.
        whiteners = torch.empty(num_classes, *root.shape, device=z.device)
        centres = torch.empty(num_classes, len(root), dtype=torch.float64, device=z.device)
        groups = list(zip(members, observed.tolist(), strict=True))
        tied_weight = None
        if family.tied_by_held_out and held_out is not None and len(held_out.labels):
            apart = projection.whiten(_lengths(family, as_matrix(held_out.z)))[:] @ root
            tied_weight = record["tied_weight"] = choose_tied_weight(
                (_moments(w.take(own), n_own), apart[held_out.labels.to(apart.device) == k])
                for k, (own, n_own) in enumerate(groups)
            )
        shrinkages = []
        for k, (own, n_own) in enumerate(groups):
            centres[k], covariance = _moments(w.take(own), n_own)
            if tied_weight is None:
                covariance, shrinkage = linalg.covariance(covariance * (n_own - 1), n_own - 1)
            else:
                covariance, shrinkage = between(covariance, tied_weight), tied_weight
            inverse = linalg.inverse_root(covariance)
            whiteners[k] = inverse.root
            constants[k] -= 0.5 * inverse.log_det
            shrinkages.append(shrinkage)
            record["clamped_eigenvalues"] += inverse.n_clamped
            record["largest_increase"] = max(record["largest_increase"], inverse.largest_increase)
        tensors |= {"centres": centres, "whiteners": whiteners}
        record["shrunk_classes"] = sum(shrinkage > 0 for shrinkage in shrinkages)
        record["mean_shrinkage"] = sum(shrinkages) / num_classes
    else:
        tensors["centres"] = means @ root
    if family is RelativeDensity:
        # x has zero mean and identity covariance over all images, and x = w V⁻¹
        tensors["background"] = torch.linalg.inv(root)
        tensors["background_constant"] = torch.tensor(-0.5 * volume, device=z.device)
    return family(tensors, record=record).to(z.device)


def _lengths(family: type[Density], z: FeatureMatrix) -> FeatureMatrix:
    """Return the features as the density reads them: of unit length, in float64 as :meth:`Density.coordinates`."""
    if not family.unit_length:
        return z
    return z.map(lambda part: functional.normalize(part.double()), z.shape[1], torch.float64)


def _moments(w: FeatureMatrix, images: int) -> ClassMoments:
    """Return mean and covariance of the labelled examples of a class, which show so many images."""
    mean = linalg.mean_of_rows(w)
    return ClassMoments(mean, linalg.scatter_about(w, mean) * (images / len(w)) / (images - 1))
