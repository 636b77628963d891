"""RBF centroids: the output layer of DUQ (van Amersfoort et al. 2020, equation 1), fitted after the fact.

    ``e = φ E``,   ``k_c = exp(−‖e − e_c‖² / (2 D σ²))``,   ``probabilities = k^γ / Σ_c k_c^γ``

E whitens the within-class covariance pooled over classes (DUQ learns one matrix per class together with
the network, which is not trained here) and e_c are class means.  The covariance is shrunk (OAS) with
fewer than ten images per column, and eigenvalues below 10⁻⁶ are clamped to it.  The length-scale σ
minimises the selection loss of DUQ, the binary cross-entropy of every kernel; the exponent γ minimises the
selection NLL.  Both are searched on a grid.  (With γ = 1, σ alone would have to make kernels informative and
probabilities calibrated: in many dimensions the latter makes every kernel vanish.)

Epistemic uncertainty: ``1 − max_c k_c``, a number in [0, 1] without unit (one minus the kernel to the
nearest centroid).  Without a posterior, the whole entropy of the probabilities is aleatoric.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.classification.heads.base import ClassifierHead, HeadOutput


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
    embedding: Tensor
    centroids: Tensor
    length_scale: Tensor
    exponent: Tensor

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Return normalised powers of the kernels, one minus the largest kernel, and minus the log of their sum."""
        # Whitening multiplies by up to 1,000 where an eigenvalue is clamped, and the roundings of float32 with it.
        embedded = (self.standardise(z).double() @ self.embedding.double()).to(z.dtype)
        squared = squared_distances(embedded, self.centroids)
        log_kernels = -squared / (2 * self.centroids.shape[1] * self.length_scale.square())
        logits = self.exponent * log_kernels
        return HeadOutput(logits.softmax(dim=1), -torch.expm1(log_kernels.amax(dim=1)), -logits.logsumexp(dim=1))


def squared_distances(
    embedded: Float[Tensor, "n dim"], centroids: Float[Tensor, "classes dim"]
) -> Float[Tensor, "n classes"]:
    """Return ``‖e − e_c‖²`` from differences, which do not cancel where classes are tight."""
    return torch.cdist(embedded, centroids, compute_mode="donot_use_mm_for_euclid_dist").square()
