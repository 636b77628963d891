"""Fit :class:`.heads.sngp.SngpHead`: length-scale, weights and τ, covariance, a temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.compute import track
from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix, blocks
from psc_core.tasks.classification.fit.data import ClassifierData
from psc_core.tasks.classification.fit.posterior import choose_posterior
from psc_core.tasks.classification.fit.softmax import SoftmaxFit, choose_softmax
from psc_core.tasks.classification.heads.sngp import SngpHead, random_features
from psc_core.tasks.fit.standardisation import in_memory

FEATURES: Final = 1024
"""Number of random features, M."""

LENGTH_SCALE_FACTORS: Final = (0.5, 1.0, 2.0)
"""Length-scales to try, times the median distance."""

LENGTH_SCALE_EXAMPLES: Final = 10_000
"""Maximum number of training examples that the length-scale is chosen on."""

IN_MEMORY_BYTES: Final = 1 << 28
"""Maximum size of ψ that is kept in memory; a larger one is computed again in each iteration."""

MEDIAN_ROWS: Final = 1_000
"""Maximum number of training examples that the median distance is measured on."""


def fit_sngp(data: ClassifierData) -> SngpHead:
    """Fit length-scale, weights, covariance and its precision."""
    generator = torch.Generator().manual_seed(data.seed)
    omega = torch.randn(data.train.shape[1], FEATURES, generator=generator).to(data.train.device)
    phases = (2 * math.pi * torch.rand(FEATURES, generator=generator)).to(data.train.device)
    length_scale = choose_length_scale(data, omega, phases)
    frequencies = omega / length_scale
    lazy = data.train.map(lambda phi: random_features(phi.float(), frequencies, phases), FEATURES, torch.float32)
    psi = in_memory(lazy) if 4 * len(lazy) * FEATURES <= IN_MEMORY_BYTES else lazy
    psi_selection = random_features(data.selection, frequencies, phases)
    softmax = choose_softmax(psi, data.train_labels, psi_selection, data.selection_labels, num_classes=data.num_classes)

    covariance = linalg.eigh(information_matrix(psi, softmax, data.weights))
    choice = choose_posterior(
        softmax.logits(psi_selection),
        logit_variance(psi_selection, covariance),
        data.selection_labels,
        prior_precision=softmax.prior_precision,
    )
    return SngpHead(
        {
            **data.standardisation._asdict(),
            "frequencies": frequencies,
            "phases": phases,
            "weight": softmax.weight / choice.temperature,
            "bias": softmax.bias / choice.temperature,
            "covariance_root": covariance.vectors
            * ((covariance.values + choice.prior_precision).rsqrt() / choice.temperature),
        },
        record={
            "length_scale": length_scale,
            "map_precision": softmax.prior_precision,
            "map_val_nll": softmax.selection_nll,
            "prior_precision": choice.prior_precision,
            "temperature": choice.temperature,
            "val_nll": choice.selection_nll,
        },
    )


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
