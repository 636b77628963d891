"""Fit a density to features: principal components, class moments, and shrinkage where images are few; all in float64.

The input is n labelled examples of K classes with features z (n, D), the output a :class:`.Density` of P components.

Three coordinate systems, each one matrix product away from the one before; the third is served:

    ``y = (z − mean) U``            principal components, orthonormal
    ``x = y diag(λ^(−1/2))``        unit total variance in every component
    ``w = x V``                     identity pooled within-class covariance, ``V = Σ_W(x)^(−1/2)``

Class moments are the paper's (appendix B.2, equations 3 and 4): ``μ_c``, ``Σ_c`` with denominator ``n_c − 1`` and
priors ``n_c / n``; a change of coordinates does not alter the fit.  An image with several labels weighs in the moments
as often as it is labelled, but is one observation: with m_c images of n_c labelled examples, ``Σ_c`` is the mean square
times ``m_c / (m_c − 1)``.  Two departures apply only where the paper's estimate is poor:

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
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.density import DENSITIES
from psc_core.density.base import Density
from psc_core.density.fit.extend import EXAMPLES
from psc_core.density.fit.pca import PCA, fit_pca
from psc_core.density.fit.tied_weight import ClassMoments, between, choose_tied_weight
from psc_core.density.gaussian import ClasswiseDensity, RelativeDensity, TiedDensity
from psc_core.fitted import Record
from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix, as_matrix, check_features, images_of_classes

WHITENER_ELEMENTS: Final = 1 << 26
"""Maximum K × P × P for the automatic choice of P (256 MiB of float32)."""


class Examples(NamedTuple):
    """n labelled examples of K classes."""

    features: Float[Tensor, "n dim"] | FeatureMatrix  # what the density reads, any float type, read in blocks
    labels: Int[Tensor, " n"]  # class index of each
    num_classes: int  # K
    images: Int[Tensor, " n"] | None = None  # which image each one shows; None where no two show the same
    class_names: Sequence[str] | None = None  # for messages

    @property
    def n_images(self) -> int:
        """Number of different images that the examples show."""
        return len(self.features) if self.images is None else int(self.images.bincount().count_nonzero())


def fit_density(
    train: Examples, *, kind: str = "gda", pca: int | None = None, held_out: Examples | None = None
) -> Density:
    """Fit a feature density.

    Args:
        train: The training examples, with the features that the density :attr:`.Density.reads`.
        kind: One of :data:`psc_core.density.DENSITIES`.
        pca: Principal components to keep.  ``None`` chooses (see :mod:`.pca`), at most images − K and, with a
            covariance for each class, so many that K · P² stays under :data:`WHITENER_ELEMENTS`.
        held_out: Examples that nothing was fitted to; a density that is :attr:`.Density.tied_by_held_out` reads them.

    Returns:
        A module on the device of the features.

    Raises:
        FitError: If features are not finite or all equal, a class has fewer than two images, or ``pca`` is beyond the
            rank.
    """
    family = DENSITIES[kind]
    features, labels, num_classes, images, names = train
    counts = check_features(features, labels, num_classes=num_classes, class_names=names, minimum=2, images=images)
    z = _lengths(family, as_matrix(features))
    projection = fit_pca(
        z,
        kept=pca,
        limit=_most_components(family, train),
        minimum_variance=family.minimum_variance,
        feature_dtype=features.dtype,  # z may be float64 already; this says how exact the features are.
    )
    pooled = pool(projection, z, train, counts)
    apart = None
    if family.tied_by_held_out and held_out is not None and len(held_out.labels):
        w = projection.whiten(_lengths(family, as_matrix(held_out.features)))[:] @ pooled.inverse.root
        apart = HeldOut(w, held_out.labels.to(w.device))
    fit = next(FITS[base] for base in family.__mro__ if base in FITS)
    part = fit(pooled, apart)
    tensors = {"mean": projection.mean, "basis": projection.whitening @ pooled.inverse.root, **part.tensors}
    record: Record = {
        EXAMPLES: len(z),
        "components": len(projection.variances),
        "explained_variance": projection.explained,
        "pooled_shrinkage": pooled.shrinkage,
        "clamped_eigenvalues": pooled.inverse.n_clamped,
        "largest_increase": pooled.inverse.largest_increase,
    }
    return family(tensors, record=record | part.record).to(z.device)


def _most_components(family: type[Density], train: Examples) -> int:
    """Return the largest P that the automatic choice may take."""
    limit = train.n_images - train.num_classes
    if family.has_class_covariances:
        limit = min(limit, math.isqrt(WHITENER_ELEMENTS // train.num_classes))
    return max(1, min(limit, family.maximum_components or limit))


class Pooled(NamedTuple):
    """The training examples in x and their pooled covariance, float64, to which every density is fitted."""

    x: FeatureMatrix  # (n, P)
    means: Float[Tensor, "K P"]  # of each class, in x
    inverse: linalg.InverseRoot  # of the pooled covariance: its root is V
    shrinkage: float  # of the pooled covariance
    volume: float  # −2 × the log-density at the centre of one Gaussian for all images
    constants: Float[Tensor, " K"]  # of one covariance for all classes
    classes: Sequence[tuple[Int[Tensor, " members"], int]]  # labelled examples of each class, and its number of images


def pool(projection: PCA, z: FeatureMatrix, train: Examples, counts: Int[Tensor, " K"]) -> Pooled:
    """Return class means and pooled covariance of ``counts`` labelled examples of each class, in x."""
    observed = counts if train.images is None else images_of_classes(train.images, train.labels, train.num_classes)
    # A stable sort, so that each fit adds the images of a class in the same order.
    members = torch.split(train.labels.argsort(stable=True), counts.tolist())
    x = projection.whiten(z)
    means = torch.stack([linalg.mean_of_rows(x.take(rows)) for rows in members])
    scatter = means.new_zeros(x.shape[1], x.shape[1])
    for rows, mean in zip(members, means, strict=True):
        scatter += linalg.scatter_about(x.take(rows), mean)
    # Labelled examples of one image are one observation; the K means take one degree of freedom each.
    n_images = train.n_images
    covariance, shrinkage = linalg.covariance(scatter * (n_images / len(z)), n_images - train.num_classes)
    inverse = linalg.inverse_root(covariance)
    volume = len(projection.variances) * math.log(2 * math.pi) + projection.variances.log().sum().item()
    constants = (counts / len(z)).double().log() - 0.5 * volume - 0.5 * inverse.log_det
    classes = list(zip(members, observed.tolist(), strict=True))
    return Pooled(x, means, inverse, shrinkage, volume, constants, classes)


class HeldOut(NamedTuple):
    """Held-out examples as the density sees them."""

    w: Float[Tensor, "m P"]
    labels: Int[Tensor, " m"]


class FamilyPart(NamedTuple):
    """The tensors besides ``mean`` and ``basis``, and the entries of the record, that this family of densities adds."""

    tensors: dict[str, Tensor]
    record: Record


def fit_tied(pooled: Pooled, held_out: HeldOut | None) -> FamilyPart:
    """Return the class means in w; held-out examples choose nothing."""
    return FamilyPart({"constants": pooled.constants, "centres": pooled.means @ pooled.inverse.root}, {})


def fit_relative(pooled: Pooled, held_out: HeldOut | None) -> FamilyPart:
    """Return the class means in w and one Gaussian for all images, which in x has mean 0 and covariance I."""
    background = {
        "background": torch.linalg.inv(pooled.inverse.root),  # x = w V⁻¹
        "background_constant": torch.tensor(-0.5 * pooled.volume, device=pooled.means.device),
    }
    return FamilyPart({**fit_tied(pooled, held_out).tensors, **background}, {})


def fit_classwise(pooled: Pooled, held_out: HeldOut | None) -> FamilyPart:
    """Return mean and whitener of each class in w; held-out examples choose how alike the whiteners are."""
    x, root, device = pooled.x, pooled.inverse.root, pooled.means.device
    w = x.map(lambda part: part @ root, x.shape[1], torch.float64)
    num_classes = len(pooled.classes)
    # Float32, and K × P × P the largest tensor: whiteners apply to differences, which no longer cancel.
    whiteners = torch.empty(num_classes, *root.shape, device=device)
    centres, constants = torch.empty_like(pooled.means), pooled.constants.clone()
    record: Record = {}
    tied_weight = None
    if held_out is not None:
        tied_weight = record["tied_weight"] = choose_tied_weight(
            (_moments(w.take(rows), n_images), held_out.w[held_out.labels == k])
            for k, (rows, n_images) in enumerate(pooled.classes)
        )
    shrinkages = []
    clamped, increase = pooled.inverse.n_clamped, pooled.inverse.largest_increase
    for k, (rows, n_images) in enumerate(pooled.classes):
        centres[k], covariance = _moments(w.take(rows), n_images)
        if tied_weight is None:
            covariance, shrinkage = linalg.covariance(covariance * (n_images - 1), n_images - 1)
        else:
            covariance, shrinkage = between(covariance, tied_weight), tied_weight
        inverse = linalg.inverse_root(covariance)
        whiteners[k] = inverse.root
        constants[k] -= 0.5 * inverse.log_det
        shrinkages.append(shrinkage)
        clamped, increase = clamped + inverse.n_clamped, max(increase, inverse.largest_increase)
    record |= {
        "clamped_eigenvalues": clamped,
        "largest_increase": increase,
        "shrunk_classes": sum(shrinkage > 0 for shrinkage in shrinkages),
        "mean_shrinkage": sum(shrinkages) / num_classes,
    }
    return FamilyPart({"constants": constants, "centres": centres, "whiteners": whiteners}, record)


FITS: Final[Mapping[type, Callable[[Pooled, HeldOut | None], FamilyPart]]] = {
    ClasswiseDensity: fit_classwise,
    TiedDensity: fit_tied,
    RelativeDensity: fit_relative,
}
"""The fit of each family of densities, by its base class."""


def _lengths(family: type[Density], z: FeatureMatrix) -> FeatureMatrix:
    """Return the features as the density reads them: in float64 and of unit length, or as they are."""
    if not family.unit_length:
        return z
    return z.map(lambda part: functional.normalize(part.double()), z.shape[1], torch.float64)


def _moments(w: FeatureMatrix, images: int) -> ClassMoments:
    """Return mean and covariance of the labelled examples of a class, which show this many ``images``."""
    mean = linalg.mean_of_rows(w)
    return ClassMoments(mean, linalg.scatter_about(w, mean) * (images / len(w)) / (images - 1))
