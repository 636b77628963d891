"""RBF centroids: the output layer of DUQ (van Amersfoort et al. 2020, equation 1), fitted after the fact.

    ``e = φ E``,   ``k_c = exp(−‖e − e_c‖² / (2 D σ²))``,   ``probabilities = k^γ / Σ_c k_c^γ``

E whitens the within-class covariance pooled over classes (DUQ learns one matrix per class together with
the network, which is not trained here) and e_c are class means.  The covariance is shrunk (OAS) with
fewer than ten images per column, and eigenvalues below 10⁻⁶ are clamped to it.  The length-scale σ
minimises the selection loss of DUQ, the binary cross-entropy of every kernel; the exponent γ is the smallest whose
selection NLL exceeds the least by at most :func:`.softmax.worth`: where all images are right, the NLL falls as long as
γ grows.  Both are searched on a grid.  (With γ = 1, σ alone would have to make kernels informative and
probabilities calibrated: in many dimensions the latter makes every kernel vanish.)

Epistemic uncertainty: ``1 − max_c k_c``, a number in [0, 1] without unit (one minus the kernel to the
nearest centroid).  Without a posterior, the whole entropy of the probabilities is aleatoric.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core import linalg
from psc_core.features import FeatureMatrix, blocks
from psc_core.heads.base import ClassifierData, ClassifierHead, ClassifierOutput
from psc_core.heads.softmax import nll, worth


class DuqHead(ClassifierHead):
    """The kernels described above, served in float32 but for the embedding."""

    kind = "duq"
    epistemic_unit = "1 − kernel to the nearest centroid, in [0, 1]"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "embedding": ("dim", "dim"),
        "centroids": ("classes", "dim"),
        "length_scale": (),
        "exponent": (),
    }

    @classmethod
    def fit(cls, data: ClassifierData) -> DuqHead:
        """Fit embedding, centroids, length-scale and exponent."""
        means, embedding, shrinkage = whitening(
            data.train, data.train_labels, data.num_classes, round(float(data.weights.sum()))
        )
        centroids = means @ embedding
        halves = squared_distances(data.selection.double() @ embedding, centroids) / (2 * data.selection.shape[1])
        labels = data.selection_labels
        length_scale = min(LENGTH_SCALES, key=lambda sigma: kernel_loss(-halves / sigma**2, labels))
        log_kernels = -halves / length_scale**2
        losses = [nll(gamma * log_kernels, labels).sum().item() for gamma in EXPONENTS]
        exponent = EXPONENTS[[loss <= min(losses) + worth(labels) for loss in losses].index(True)]
        chosen = {"length_scale": length_scale, "exponent": exponent}
        return cls(
            {
                **data.standardisation._asdict(),
                "embedding": embedding,
                "centroids": centroids,
                **{name: torch.tensor(value, device=embedding.device) for name, value in chosen.items()},
            },
            record={**chosen, "shrinkage": shrinkage, "val_nll": nll(exponent * log_kernels, labels).mean().item()},
        )

    def forward(self, z: Float[Tensor, "batch dim"]) -> ClassifierOutput:
        # Whitening multiplies by up to 1,000 where an eigenvalue is clamped, and the roundings of float32 with it.
        embedded = (self.standardise(z).double() @ self.embedding.double()).to(z.dtype)
        squared = squared_distances(embedded, self.centroids)
        log_kernels = -squared / (2 * self.centroids.shape[1] * self.length_scale.square())
        logits = self.exponent * log_kernels
        return ClassifierOutput(logits.softmax(dim=1), -torch.expm1(log_kernels.amax(dim=1)))


def squared_distances(
    embedded: Float[Tensor, "n dim"], centroids: Float[Tensor, "classes dim"]
) -> Float[Tensor, "n classes"]:
    """Return ``‖e − e_c‖²`` from differences, which do not cancel where classes are tight."""
    return linalg.distances(embedded, centroids).square()


# Values of σ to try: 10⁻² … 10², eight to a decade; a training image is about √D from its centroid.
LENGTH_SCALES: Final = tuple(10.0 ** (k / 8) for k in range(-16, 17))

EXPONENTS: Final = tuple(10.0 ** (k / 8) for k in range(-16, 33))  # values of γ to try: 10⁻² … 10⁴, eight to a decade


def kernel_loss(log_kernels: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Return DUQ's loss: the mean of ``−log k_y − Σ_{c ≠ y} log(1 − k_c)``, nats."""
    others = -torch.log(-torch.expm1(log_kernels.clamp(max=-1e-12)))
    others = others.scatter(1, labels[:, None], 0.0)
    return (others.sum(dim=1) - log_kernels.gather(1, labels[:, None])[:, 0]).mean().item()


def whitening(
    phi: Float[Tensor, "n dim"] | FeatureMatrix, labels: Int[Tensor, " n"], num_classes: int, images: int
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, "dim dim"], float]:
    """Return class means, the inverse root of the pooled within-class covariance, and its OAS intensity.

    Labelled examples of one of the ``images`` are one observation.
    """
    n, dim = phi.shape
    means = torch.zeros(num_classes, dim, dtype=torch.float64, device=phi.device)
    for chunk, block in blocks(phi):
        means.index_add_(0, labels[chunk], block.double())
    means /= torch.bincount(labels, minlength=num_classes)[:, None]
    scatter = means.new_zeros(dim, dim)
    for chunk, block in blocks(phi):
        centred = block.double() - means[labels[chunk]]
        scatter += centred.T @ centred
    covariance, shrinkage = linalg.covariance(scatter * (images / n), max(1, images - num_classes))
    return means, linalg.inverse_root(covariance).root, shrinkage
