"""Fitting a density to z: PCA, class moments, shrinkage where images are few; all in float64.

Three coordinate systems, each one matrix product from the last (:mod:`psc_core.density.gaussian` serves the third):

    ``y = (z − mean) U``            principal components, orthonormal
    ``x = y diag(λ^(−1/2))``        unit total variance in every component
    ``w = x V``                     identity pooled within-class covariance, ``V = Σ_W(x)^(−1/2)``

Class moments are the paper's: ``μ_c``, ``Σ_c`` with denominator ``n_c − 1`` and priors ``n_c / n``; a change
of coordinates leaves them what they are.  Two departures apply only where the paper's estimate is poor:

* fewer than :data:`IMAGES_PER_COMPONENT` images for each component: OAS shrinkage, of a class covariance
  towards (a multiple of) the pooled one, and of the pooled one towards (a multiple of) the total one,
  which is what "towards the identity" means in w and in x;
* an eigenvalue below 10⁻⁶, that is, a within-class deviation a thousand times smaller than the total one, or
  a class deviation a thousand times smaller than the pooled one, is lifted to it (identical images;
  complete collapse).

What was done is in the record of the fit.
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
"""Images for each component below which a covariance is shrunk."""

WHITENER_ELEMENTS: Final = 1 << 26
"""Largest K × P × P that the automatic choice of P leads to (256 MiB of float32)."""


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
        z: What the kind reads (:attr:`Density.reads`), any float type, read in blocks; an image with several
            labels is repeated, once for each.
        labels: Class index of each row.
        num_classes: K.
        kind: One of :data:`psc_core.density.DENSITIES`.
        pca: Principal components to keep; ``None`` chooses (see :mod:`.pca`) with the limit that the images beyond
            one a class outnumber components, and, with a covariance for each class, that K · P² stays under
            :data:`WHITENER_ELEMENTS`.  Covariances of fewer images than that asks for are shrunk.
        class_names: Names for messages.

    Returns:
        A float32 module on the device of ``z``.

    Raises:
        UsageError: An unknown kind.
        FitError: Features that are not finite or all equal, a class with fewer than two rows, or a ``pca``
            beyond the rank.
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
    limit = min(limit, family.most_components or limit)
    projection = fit_pca(z, kept=pca, limit=max(1, limit), least_variance=family.least_variance)

    rows_of_class = torch.split(labels.argsort(stable=True), counts.tolist())
    x = projection.whiten(z)
    pooled = _pool(x, rows_of_class)
    root = pooled.inverse.root
    tensors = {"mean": projection.mean, "basis": projection.whitening @ root}
    record: Record = {
        "components": len(projection.variances),
        "explained_variance": projection.explained,
        "pooled_shrinkage": pooled.shrinkage,
        "lifted_eigenvalues": pooled.inverse.n_clamped,
        "largest_lift": pooled.inverse.largest_increase,
    }
    constants = (counts / len(z)).double().log() - 0.5 * _volume(projection) - 0.5 * pooled.inverse.log_det
    if classwise:
        whiteners, offsets, log_dets, class_record = _class_covariances(
            x.map(lambda part: part @ root, x.shape[1], torch.float64), rows_of_class
        )
        tensors |= {"whiteners": whiteners, "offsets": offsets, "constants": constants - 0.5 * log_dets}
        record["lifted_eigenvalues"] += class_record.pop("lifted_eigenvalues")
        record["largest_lift"] = max(record["largest_lift"], class_record.pop("largest_lift"))
        record |= class_record
    else:
        tensors |= {"centres": pooled.means @ root, "constants": constants}
    if family is RelativeDensity:
        # x has zero mean and identity covariance over all images, and x = w V⁻¹
        tensors["background"] = torch.linalg.inv(root)
        tensors["background_constant"] = torch.tensor(-0.5 * _volume(projection), device=z.device)
    return family(tensors, record=record).to(z.device)


def _volume(projection: PCA) -> float:
    """``P log 2π + log det`` of the total covariance: −2 × the log-density at its centre."""
    return len(projection.variances) * math.log(2 * math.pi) + projection.variances.log().sum().item()


class _Pooled(NamedTuple):
    """Class means in x, and the inverse root V of the pooled within-class covariance."""

    means: Float[Tensor, "classes kept"]
    inverse: linalg.InverseRoot
    shrinkage: float


def _pool(x: FeatureMatrix, rows_of_class: Sequence[Int[Tensor, " _"]]) -> _Pooled:
    means = torch.stack([linalg.mean_of_rows(x.take(rows)) for rows in rows_of_class])
    scatter = means.new_zeros(x.shape[1], x.shape[1])
    for rows, mean in zip(rows_of_class, means, strict=True):
        scatter += linalg.scatter_about(x.take(rows), mean)
    freedom = len(x) - len(rows_of_class)
    covariance, shrinkage = _shrink(scatter / freedom, freedom)
    return _Pooled(means, linalg.inverse_root(covariance, scale=1.0), shrinkage)


def _class_covariances(
    w: FeatureMatrix, rows_of_class: Sequence[Int[Tensor, " _"]]
) -> tuple[Tensor, Tensor, Tensor, Record]:
    """Whiteners (K, P, P), offsets (K, P) and log-determinants (K,); float64 for one class at a time."""
    classes, kept = len(rows_of_class), w.shape[1]
    whiteners = torch.empty(classes, kept, kept, device=w.device)
    offsets = torch.empty(classes, kept, device=w.device)
    log_dets = torch.empty(classes, dtype=torch.float64, device=w.device)
    intensities, lifted, largest_lift = [], 0, 0.0
    for k, rows in enumerate(rows_of_class):
        mean = linalg.mean_of_rows(w.take(rows))
        freedom = len(rows) - 1
        covariance, intensity = _shrink(linalg.scatter_about(w.take(rows), mean) / freedom, freedom)
        inverse = linalg.inverse_root(covariance, scale=1.0)
        whiteners[k], offsets[k], log_dets[k] = inverse.root, -inverse.root @ mean, inverse.log_det
        intensities.append(intensity)
        lifted, largest_lift = lifted + inverse.n_clamped, max(largest_lift, inverse.largest_increase)
    record: Record = {
        "shrunk_classes": sum(intensity > 0 for intensity in intensities),
        "mean_shrinkage": sum(intensities) / classes,
        "lifted_eigenvalues": lifted,
        "largest_lift": largest_lift,
    }
    return whiteners, offsets, log_dets, record


def _shrink(covariance: Float[Tensor, "d d"], samples: int) -> tuple[Float[Tensor, "d d"], float]:
    """OAS where there are fewer than :data:`IMAGES_PER_COMPONENT` samples for each component."""
    if samples >= IMAGES_PER_COMPONENT * covariance.shape[0]:
        return covariance, 0.0
    return linalg.oas_shrinkage(covariance, samples)
