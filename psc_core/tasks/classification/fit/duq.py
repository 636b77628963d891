"""Fit :class:`.heads.duq.DuqHead`: embedding, centroids, length-scale, exponent."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix, blocks
from psc_core.tasks.classification.fit.data import ClassifierData
from psc_core.tasks.classification.fit.posterior import nll
from psc_core.tasks.classification.heads.duq import DuqHead, squared_distances

LENGTH_SCALES: Final = tuple(10.0 ** (k / 8) for k in range(-16, 17))
"""Values of σ to try: 10⁻² … 10², eight to a decade; a training image is about √D from its centroid."""

EXPONENTS: Final = tuple(10.0 ** (k / 8) for k in range(-16, 33))
"""Values of γ to try: 10⁻² … 10⁴, eight to a decade."""


def fit_duq(data: ClassifierData) -> DuqHead:
    """Fit embedding, centroids, length-scale and exponent."""
    means, embedding, shrinkage = whitening(data.train, data.train_labels, data.num_classes)
    centroids = means @ embedding
    halves = squared_distances(data.selection.double() @ embedding, centroids) / (2 * data.selection.shape[1])
    labels = data.selection_labels
    length_scale = min(LENGTH_SCALES, key=lambda sigma: kernel_loss(-halves / sigma**2, labels))
    log_kernels = -halves / length_scale**2
    exponent = min(EXPONENTS, key=lambda gamma: nll(gamma * log_kernels, labels).mean().item())
    return DuqHead(
        {
            **data.standardisation._asdict(),
            "embedding": embedding,
            "centroids": centroids,
            "length_scale": torch.tensor(length_scale, device=embedding.device),
            "exponent": torch.tensor(exponent, device=embedding.device),
        },
        record={
            "length_scale": length_scale,
            "exponent": exponent,
            "shrinkage": shrinkage,
            "val_nll": nll(exponent * log_kernels, labels).mean().item(),
        },
    )


def kernel_loss(log_kernels: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Return DUQ's loss: the mean of ``−log k_y − Σ_{c ≠ y} log(1 − k_c)``, nats."""
    others = -torch.log(-torch.expm1(log_kernels.clamp(max=-1e-12)))
    others = others.scatter(1, labels[:, None], 0.0)
    return (others.sum(dim=1) - log_kernels.gather(1, labels[:, None])[:, 0]).mean().item()


def whitening(
    phi: Float[Tensor, "n dim"] | FeatureMatrix, labels: Int[Tensor, " n"], num_classes: int
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, "dim dim"], float]:
    """Return class means, the inverse root of the pooled within-class covariance, and its OAS intensity."""
    n, dim = phi.shape
    means = torch.zeros(num_classes, dim, dtype=torch.float64, device=phi.device)
    for chunk, block in blocks(phi):
        means.index_add_(0, labels[chunk], block.double())
    means /= torch.bincount(labels, minlength=num_classes)[:, None]
    scatter = torch.zeros(dim, dim, dtype=torch.float64, device=phi.device)
    for chunk, block in blocks(phi):
        centred = block.double() - means[labels[chunk]]
        scatter += centred.T @ centred
    covariance, shrinkage = linalg.covariance(scatter, max(1, n - num_classes))
    return means, linalg.inverse_root(covariance).root, shrinkage
