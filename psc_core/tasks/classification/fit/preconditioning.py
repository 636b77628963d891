"""Variables in which logistic regression is well conditioned, for L-BFGS that starts at given weights.

With ``θ = [W b]``, ``φ̃ = (φ, 1)``, ``p`` the probabilities at the start, ``w = 1 − Σ_c p_c²``, n labelled examples
and prior precision τ,

    ``A = Σ_i w_i φ̃_i φ̃_iᵀ / Σ_i w_i = Q_A diag(λ_A) Q_Aᵀ``
    ``B = (1/n) Σ_i (diag p_i − p_i p_iᵀ) = Q_B diag(λ_B) Q_Bᵀ``
    ``V = √(λ_B λ_Aᵀ + τ/n) ∘ (Q_Bᵀ θ Q_A)``

make the curvature at the start near the identity, as far as a Kronecker product can (KFAC, Martens & Grosse 2015, with
examples weighted by what they contribute).  Where the examples are many and the weights few, the exact curvature takes
the place of the product and needs a third of the iterations:

    ``V = Lᵀ vec θ``  with  ``L Lᵀ = (1/n) Σ_i (diag p_i − p_i p_iᵀ) ⊗ φ̃_i φ̃_iᵀ + τ/n``

Both are measured on about :data:`CURVATURE_EXAMPLES` examples; they change the path of the iterations, not the minimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix, as_matrix, blocks

CURVATURE_EXAMPLES: Final = 8192
"""Number of labelled examples that the curvature is measured on, unless the columns ask for more."""

CURVATURE_EXAMPLES_PER_COLUMN: Final = 4

EXACT_WEIGHTS: Final = 2048
"""Maximum number of weights and biases for the exact curvature (32 MiB)."""

EXACT_REPEATS: Final = 4
"""Minimum ratio of all examples to those measured at which the exact curvature saves more time than it costs."""


class KroneckerVariables(NamedTuple):
    """``V = scale ∘ (outputsᵀ θ inputs)`` for θ = [W b]: to V, back to θ, and for gradients with respect to θ."""

    outputs: Float[Tensor, "classes classes"]
    inputs: Float[Tensor, "columns columns"]
    scale: Float[Tensor, "classes columns"]

    def of(self, theta: Tensor) -> Tensor:
        return (self.outputs.T @ theta @ self.inputs) * self.scale

    def theta(self, v: Tensor) -> Tensor:
        return self.outputs @ (v / self.scale) @ self.inputs.T

    def gradient(self, gradient: Tensor) -> Tensor:
        return (self.outputs.T @ gradient @ self.inputs) / self.scale


class ExactVariables(NamedTuple):
    """``V = Lᵀ vec θ``, with the same three methods."""

    lower: Float[Tensor, "weights weights"]

    def of(self, theta: Tensor) -> Tensor:
        return (self.lower.T @ theta.flatten()).view_as(theta)

    def theta(self, v: Tensor) -> Tensor:
        return cast(Tensor, torch.linalg.solve_triangular(self.lower.T, v.reshape(-1, 1), upper=True)).view_as(v)

    def gradient(self, gradient: Tensor) -> Tensor:
        solved = cast(Tensor, torch.linalg.solve_triangular(self.lower, gradient.reshape(-1, 1), upper=False))
        return solved.view_as(gradient)


Variables = KroneckerVariables | ExactVariables


def variables_at(
    theta: Float[Tensor, "classes columns"], features: Float[Tensor, "n dim"] | FeatureMatrix, *, prior_precision: float
) -> Variables:
    """Return V for a fit that starts at ``theta``, float64: of the exact curvature where that saves time."""
    n = len(features)
    count = min(n, max(CURVATURE_EXAMPLES, CURVATURE_EXAMPLES_PER_COLUMN * theta.shape[1]))
    # One from each of `count` equal parts, at random: examples may come in order, or repeat periodically.
    offset = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample = as_matrix(features).take(((torch.arange(count) + offset) * (n / count)).long().to(features.device))
    if theta.numel() <= EXACT_WEIGHTS and n >= EXACT_REPEATS * count:
        return ExactVariables(curvature_root(theta, sample, prior_precision / n))
    return kronecker_variables(theta, sample, prior_precision / n)


def augmented_blocks(
    theta: Float[Tensor, "classes columns"], sample: FeatureMatrix, columns: int
) -> Iterator[tuple[Float[Tensor, "m columns"], Float[Tensor, "m classes"]]]:
    """Yield φ̃ and p, a block at a time."""
    for _, block in blocks(sample, columns=columns):
        augmented = functional.pad(block.to(theta.dtype), (0, 1), value=1.0)
        yield augmented, (augmented @ theta.T).softmax(dim=1)


def kronecker_variables(
    theta: Float[Tensor, "classes columns"], sample: FeatureMatrix, ridge: float
) -> KroneckerVariables:
    classes, columns = theta.shape
    inputs, outputs = theta.new_zeros(columns, columns), theta.new_zeros(classes, classes)
    for phi, p in augmented_blocks(theta, sample, columns + classes):
        inputs += (phi * (1 - p.square().sum(1, keepdim=True))).T @ phi
        outputs += p.sum(0).diag() - p.T @ p
    b, a = linalg.eigh(outputs / len(sample)), linalg.eigh(inputs / outputs.trace())
    return KroneckerVariables(b.vectors, a.vectors, (torch.outer(b.values, a.values) + ridge).sqrt())


def curvature_root(
    theta: Float[Tensor, "classes columns"], sample: FeatureMatrix, ridge: float
) -> Float[Tensor, "weights weights"]:
    """Return the Cholesky factor of the curvature with ``ridge`` on its diagonal."""
    classes, columns = theta.shape
    total = theta.new_zeros(classes, columns, classes * columns)
    for phi, p in augmented_blocks(theta, sample, 4 * columns):
        for c in range(classes):
            weights = p[:, c, None] * -p[:, : c + 1]
            weights[:, c] += p[:, c]
            total[c, :, : (c + 1) * columns] += phi.T @ (weights[:, :, None] * phi[:, None]).flatten(1)
    lower = total.view(classes * columns, -1).tril_() / len(sample)
    whole = lower + lower.tril(-1).T
    whole.diagonal().add_(ridge)
    return cast(Tensor, torch.linalg.cholesky(whole))
