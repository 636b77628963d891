"""Random-feature Gaussian process: the output layer of SNGP (Liu et al. 2020), fitted after the fact.

    ``ψ(φ) = √2 cos(φ Ω / ℓ + β)``,   Ω ~ N(0, 1), β ~ U(0, 2π), M features     (their equation 8)
    ``μ = W ψ + b``,   ``s² = ψᵀ (τ I + Σ_i p_i (1 − p_i) ψ_i ψ_iᵀ)⁻¹ ψ``
    ``probabilities = softmax(μ / √(1 + π s² / 8))``                           (mean-field logits)

``ψᵀψ′ / M`` approximates the RBF kernel of length-scale ℓ.  One covariance serves all classes, with p_i the
largest class probability of image i: K matrices of M × M would be too large for a thousand classes.  ℓ is the
median distance between training features times 0.5, 1 or 2, whichever has the smallest selection NLL.  The logits
are divided by a temperature T (:mod:`.fit.posterior`): the stored W and b by T, s² by T².

Departure: features have unit mean square (theirs √(2/M) cos); W and τ absorb the factor.

Epistemic uncertainty: s², the variance of a logit (squared logits), from near 0 at the training images to
at most 2 M / (τ T²) far from them.  Of the entropy of the probabilities, that of ``softmax(μ)`` is aleatoric and the
rest epistemic, nats: the rest is what s² adds by dividing the logits, and never negative.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from psc_core.tasks.classification.heads.base import ClassifierHead, HeadOutput, UncertaintyDecomposition, entropy


class SngpHead(ClassifierHead):
    """The process described above, served in float32."""

    kind = "sngp"
    epistemic_unit = "squared logits (variance of the Gaussian process)"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "frequencies": ("dim", "features"),
        "phases": ("features",),
        "weight": ("classes", "features"),
        "bias": ("classes",),
        "covariance_root": ("features", "features"),
    }
    frequencies: Tensor
    phases: Tensor
    weight: Tensor
    bias: Tensor
    covariance_root: Tensor

    def logits(self, z: Float[Tensor, "batch dim"]) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, " batch"]]:
        """Return mean μ and variance s² of the logits."""
        psi = random_features(self.standardise(z), self.frequencies, self.phases)
        variance = (psi @ self.covariance_root).square().sum(dim=1)
        return functional.linear(psi, self.weight, self.bias), variance

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Return mean-field probabilities, logit variance and energy of the mean logits."""
        mean, variance = self.logits(z)
        return HeadOutput(mean_field(mean, variance).softmax(dim=1), variance, -mean.logsumexp(dim=1))

    def decompose(self, z: Float[Tensor, "batch dim"]) -> UncertaintyDecomposition:
        """Return the entropy at the mean weights, and what the variance adds to it."""
        mean, variance = self.logits(z)
        total = entropy(mean_field(mean, variance).softmax(dim=1))
        aleatoric = torch.minimum(entropy(mean.softmax(dim=1)), total)
        return UncertaintyDecomposition(aleatoric, total - aleatoric)


def random_features(
    phi: Float[Tensor, "n dim"],
    frequencies: Float[Tensor, "dim features"],
    phases: Float[Tensor, " features"],
) -> Float[Tensor, "n features"]:
    """Return ``√2 cos(φ Ω / ℓ + β)``; ``frequencies`` are Ω / ℓ."""
    return torch.cos(torch.addmm(phases, phi, frequencies)) * math.sqrt(2.0)


def mean_field(mean: Float[Tensor, "n classes"], variance: Float[Tensor, " n"]) -> Float[Tensor, "n classes"]:
    """Return ``μ / √(1 + π s² / 8)``."""
    return mean * (1.0 + (math.pi / 8.0) * variance[:, None]).rsqrt()
