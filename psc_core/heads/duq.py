"""RBF centroids: the output layer of DUQ (van Amersfoort et al. 2020), fitted after the fact.

    ``e = φ E``,   ``k_c = exp(−‖e − e_c‖² / (2 D σ²))``,   ``probabilities = k^γ / Σ_c k_c^γ``

E whitens the within-class covariance pooled over classes (theirs learns one matrix for each class together
with the network; here the network stays as it is) and e_c are class means.  The covariance is shrunk (OAS)
where there are fewer than ten images a column, and eigenvalues below 10⁻⁶ are lifted.  The length-scale σ
has the smallest validation loss of DUQ, the binary cross-entropy of every kernel; the exponent γ has the
smallest validation NLL.  Both are on a grid.  (With γ = 1 one number would have to make kernels readable and
probabilities calibrated: in many dimensions the second makes every kernel vanish.)

Epistemic uncertainty: ``1 − max_c k_c``, a number in [0, 1] without unit (one minus the kernel to the
nearest centroid).  Aleatoric: the entropy of the probabilities, nats.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.heads.base import Head, HeadData, HeadOutput, Split, entropy, nll
from psc_core.numerics import linalg
from psc_core.numerics.matrix import FeatureMatrix, blocks

LENGTH_SCALES: Final = tuple(10.0 ** (k / 8) for k in range(-16, 17))
"""σ tried: 10⁻² … 10², eight to a decade; a training image is about √D from its centroid."""

EXPONENTS: Final = tuple(10.0 ** (k / 8) for k in range(-16, 33))
"""γ tried: 10⁻² … 10⁴, eight to a decade."""

ROWS_PER_COLUMN: Final = 10
"""Training rows for each column below which the covariance is shrunk."""


class DuqHead(Head):
    """The kernels of the module's text, served in float32."""

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
    embedding: Tensor
    centroids: Tensor
    length_scale: Tensor
    exponent: Tensor

    def log_kernels(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """``log k_c``."""
        squared = squared_distances(self.standardise(z) @ self.embedding, self.centroids)
        return -squared / (2 * self.centroids.shape[1] * self.length_scale.square())

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Normalised powers of the kernels, and one minus the largest kernel."""
        log_kernels = self.log_kernels(z)
        return HeadOutput((self.exponent * log_kernels).softmax(dim=1), -torch.expm1(log_kernels.amax(dim=1)))

    def split(self, z: Float[Tensor, "batch dim"]) -> Split:
        """Entropy of the probabilities (nats), and one minus the largest kernel."""
        probabilities, epistemic = self(z)
        return Split(entropy(probabilities), epistemic)


def squared_distances(
    rows: Float[Tensor, "n dim"], centroids: Float[Tensor, "classes dim"]
) -> Float[Tensor, "n classes"]:
    """``‖e − e_c‖²`` by differences, which does not cancel where classes are tight."""
    return torch.cdist(rows, centroids, compute_mode="donot_use_mm_for_euclid_dist").square()


def fit_duq(data: HeadData) -> DuqHead:
    """Embedding, centroids, length-scale and exponent."""
    means, embedding, shrinkage = _whiten(data.train, data.train_labels, data.num_classes)
    centroids = means @ embedding
    halves = squared_distances(data.val.double() @ embedding, centroids) / (2 * data.val.shape[1])
    labels = data.val_labels
    length_scale = min(LENGTH_SCALES, key=lambda sigma: kernel_loss(-halves / sigma**2, labels))
    log_kernels = -halves / length_scale**2
    exponent = min(EXPONENTS, key=lambda gamma: nll(gamma * log_kernels, labels).mean().item())
    return DuqHead(
        {
            **data.shared_tensors,
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
    """DUQ's loss: the mean over rows of ``−log k_y − Σ_{c ≠ y} log(1 − k_c)``, nats."""
    others = -torch.log(-torch.expm1(log_kernels.clamp(max=-1e-12)))
    others = others.scatter(1, labels[:, None], 0.0)
    return (others.sum(dim=1) - log_kernels.gather(1, labels[:, None])[:, 0]).mean().item()


def _whiten(
    phi: Float[Tensor, "n dim"] | FeatureMatrix, labels: Int[Tensor, " n"], num_classes: int
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, "dim dim"], float]:
    """Class means, the inverse root of the pooled within-class covariance, and its OAS intensity."""
    n, dim = phi.shape
    means = torch.zeros(num_classes, dim, dtype=torch.float64, device=phi.device)
    for chunk, block in blocks(phi):
        means.index_add_(0, labels[chunk], block.double())
    means /= torch.bincount(labels, minlength=num_classes)[:, None]
    scatter = torch.zeros(dim, dim, dtype=torch.float64, device=phi.device)
    for chunk, block in blocks(phi):
        centred = block.double() - means[labels[chunk]]
        scatter += centred.T @ centred
    freedom = max(1, n - num_classes)
    covariance, shrinkage = scatter / freedom, 0.0
    if freedom < ROWS_PER_COLUMN * dim:
        covariance, shrinkage = linalg.oas_shrinkage(covariance, freedom)
    return means, linalg.inverse_root(covariance, scale=1.0).root, shrinkage
