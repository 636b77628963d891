"""Random-feature Gaussian process: the output layer of SNGP (Liu et al. 2020), fitted after the fact.

    ``ψ(φ) = √2 cos(φ Ω / ℓ + β)``,   Ω ~ N(0, 1), β ~ U(0, 2π), M features     (their equation 8)
    ``μ = W ψ + b``,   ``s² = ψᵀ (τ I + Σ_i p_i (1 − p_i) ψ_i ψ_iᵀ)⁻¹ ψ``
    ``probabilities = softmax(μ / √(1 + π s² / 8))``                           (mean-field logits)

``ψᵀψ′ / M`` approximates the RBF kernel of length-scale ℓ.  One covariance serves all classes, with p_i the
largest class probability of image i: K matrices of M × M would be too large for a thousand classes.  ℓ is the
median distance between training features times 0.5, 1 or 2, whichever has the smallest selection NLL.  The logits
are divided by a temperature T (:mod:`.softmax`): the stored W and b by T, s² by T².

Departure: features have unit mean square (theirs √(2/M) cos); W and τ absorb the factor.

Epistemic uncertainty: s², the variance of a logit (squared logits), from near 0 at the training images to
at most 2 M / (τ T²) far from them.  Of the entropy of the probabilities, that of ``softmax(μ)`` is aleatoric and the
rest epistemic, nats: the rest is what s² adds by dividing the logits, and never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.compute import track
from psc_core.features import FeatureMatrix, blocks
from psc_core.heads.base import (
    ClassifierData,
    ClassifierHead,
    ClassifierOutput,
    UncertaintyDecomposition,
    entropy,
    in_memory,
)
from psc_core.heads.softmax import SoftmaxFit, choose_posterior, choose_softmax


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

    @classmethod
    def fit(cls, data: ClassifierData) -> SngpHead:
        """Fit length-scale, weights, covariance and its precision."""
        generator = torch.Generator().manual_seed(data.seed)
        omega = torch.randn(data.train.shape[1], FEATURES, generator=generator).to(data.train.device)
        phases = (2 * math.pi * torch.rand(FEATURES, generator=generator)).to(data.train.device)
        length_scale = choose_length_scale(data, omega, phases)
        frequencies = omega / length_scale
        lazy = data.train.map(lambda phi: random_features(phi.float(), frequencies, phases), FEATURES, torch.float32)
        psi = in_memory(lazy) if 4 * len(lazy) * FEATURES <= IN_MEMORY_BYTES else lazy
        psi_selection, labels = random_features(data.selection, frequencies, phases), data.selection_labels
        softmax = choose_softmax(psi, data.train_labels, psi_selection, labels, num_classes=data.num_classes)
        covariance = linalg.eigh(information_matrix(psi, softmax, data.weights))
        logits, variance_with = softmax.logits(psi_selection), logit_variance(psi_selection, covariance)
        choice = choose_posterior(logits, variance_with, labels, prior_precision=softmax.prior_precision)
        return cls(
            {
                **data.standardisation._asdict(),
                "frequencies": frequencies,
                "phases": phases,
                **softmax.divided_by(choice.temperature),
                "covariance_root": covariance.vectors
                * ((covariance.values + choice.prior_precision).rsqrt() / choice.temperature),
            },
            record={"length_scale": length_scale, **choice.record(softmax)},
        )

    def logits(self, z: Float[Tensor, "batch dim"]) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, " batch"]]:
        """Return mean μ and variance s² of the logits."""
        psi = random_features(self.standardise(z), self.frequencies, self.phases)
        variance = (psi @ self.covariance_root).square().sum(dim=1)
        return functional.linear(psi, self.weight, self.bias), variance

    def forward(self, z: Float[Tensor, "batch dim"]) -> ClassifierOutput:
        mean, variance = self.logits(z)
        return ClassifierOutput(mean_field(mean, variance).softmax(dim=1), variance)

    def decompose(self, z: Float[Tensor, "batch dim"]) -> UncertaintyDecomposition:
        mean, variance = self.logits(z)
        total = entropy(mean_field(mean, variance).softmax(dim=1))
        aleatoric = torch.minimum(entropy(mean.softmax(dim=1)), total)
        return UncertaintyDecomposition(aleatoric, total - aleatoric)


def random_features(
    phi: Float[Tensor, "n dim"], frequencies: Float[Tensor, "dim features"], phases: Float[Tensor, " features"]
) -> Float[Tensor, "n features"]:
    """Return ``√2 cos(φ Ω / ℓ + β)``; ``frequencies`` are Ω / ℓ."""
    return torch.cos(torch.addmm(phases, phi, frequencies)) * math.sqrt(2.0)


def mean_field(mean: Float[Tensor, "n classes"], variance: Float[Tensor, " n"]) -> Float[Tensor, "n classes"]:
    """Return ``μ / √(1 + π s² / 8)``."""
    return mean * (1.0 + (math.pi / 8.0) * variance[:, None]).rsqrt()


FEATURES: Final = 1024  # number of random features, M
LENGTH_SCALE_FACTORS: Final = (0.5, 1.0, 2.0)  # length-scales to try, times the median distance
LENGTH_SCALE_EXAMPLES: Final = 10_000  # maximum number of training examples that the length-scale is chosen on
IN_MEMORY_BYTES: Final = 1 << 28  # of ψ; a larger one is computed again in each iteration
MEDIAN_ROWS: Final = 1_000  # maximum number of training examples that the median distance is measured on


def choose_length_scale(data: ClassifierData, omega: Tensor, phases: Tensor) -> float:
    """Return the multiple of the median distance with the smallest selection NLL."""
    sample = data.train[:: math.ceil(len(data.train) / MEDIAN_ROWS)].float()
    distances = torch.pdist(sample)
    apart = distances[distances > 0]
    median = apart.median().item() if len(apart) else math.sqrt(2 * sample.shape[1])
    every = math.ceil(len(data.train) / LENGTH_SCALE_EXAMPLES)
    sample, labels = data.train[::every].float(), data.train_labels[::every]

    def selection_nll(length_scale: float) -> float:
        psi, psi_selection = (random_features(phi, omega / length_scale, phases) for phi in (sample, data.selection))
        fit = choose_softmax(
            psi, labels, psi_selection, data.selection_labels, num_classes=data.num_classes, finish=False
        )
        return fit.selection_nll

    factors = track(LENGTH_SCALE_FACTORS, total=len(LENGTH_SCALE_FACTORS), description="head: length-scales")
    return min((factor * median for factor in factors), key=selection_nll)


def information_matrix(
    psi: Float[Tensor, "n features"] | FeatureMatrix, softmax: SoftmaxFit, weights: Float[Tensor, " n"]
) -> Float[Tensor, "features features"]:
    """Return ``Σ_i weights_i p_i (1 − p_i) ψ_i ψ_iᵀ`` with p_i the largest class probability, float64."""
    total = torch.zeros(psi.shape[1], psi.shape[1], dtype=torch.float64, device=psi.device)
    for chunk, block in blocks(psi):
        wide = block.double()
        largest = softmax.logits(wide).softmax(dim=1).amax(dim=1)
        total += wide.T @ (wide * (weights[chunk] * largest * (1 - largest))[:, None])
    return total


def logit_variance(psi: Float[Tensor, "m features"], covariance: linalg.Eigen) -> Callable[[float], Tensor]:
    """Return s² of the selection examples, (m, 1), as a function of τ."""
    squares = (psi @ covariance.vectors.to(psi.dtype)).square()

    def variance_with(prior_precision: float) -> Tensor:
        return (squares @ (covariance.values + prior_precision).reciprocal().to(psi.dtype))[:, None]

    return variance_with
