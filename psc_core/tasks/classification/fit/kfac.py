"""The KFAC posterior of a linear layer under the softmax likelihood, by laplace-torch (symbols: heads/laplace.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.numerics import linalg
from psc_core.numerics.features import FeatureMatrix, blocks


class Kfac(NamedTuple):
    """Eigendecompositions of the factors A (inputs) and B (outputs), float64."""

    input_values: Float[Tensor, " dim"]
    input_vectors: Float[Tensor, "dim dim"]
    output_values: Float[Tensor, " classes"]
    output_vectors: Float[Tensor, "classes classes"]

    def spectra(self, prior_precision: float) -> tuple[Float[Tensor, "dim classes"], Float[Tensor, " classes"]]:
        """Return ``1 / (λ_Ai λ_Bj + τ)`` and ``1 / (λ_Bj + τ)``."""
        weights = torch.outer(self.input_values, self.output_values) + prior_precision
        return weights.reciprocal(), (self.output_values + prior_precision).reciprocal()


def fit_kfac(
    weight: Float[Tensor, "classes dim"],
    bias: Float[Tensor, " classes"],
    phi: Float[Tensor, "n dim"] | FeatureMatrix,
    weights: Float[Tensor, " n"],
) -> Kfac:
    """Fit the KFAC posterior of a linear layer by laplace-torch, in float64; example i counts ``weights[i]`` times.

    The curvature of the softmax likelihood does not depend on labels, so none are given.
    laplace-torch's own curvature back ends compute B with one backward pass per class.  The one given to it here sums
    outer products, and agrees with them to rounding.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its optional back ends warn when imported
        from laplace import Laplace
        from laplace.curvature import GGNInterface
        from laplace.utils import Kron

    class LinearSoftmax(GGNInterface):  # type: ignore[misc, unused-ignore]
        @torch.no_grad()
        def kron(self, x: Any, y: Tensor, N: int, **_: Any) -> tuple[Tensor, Any]:
            """Return the terms of A and B from this batch with the weights ``y``."""
            p = self.model(x).softmax(dim=1)
            weighted = p * y[:, None]
            outputs = weighted.sum(0).diag() - weighted.T @ p
            factors: Any = [[outputs, x.T @ (x * y[:, None]) / total], [outputs.clone()]]
            return p.new_zeros(()), Kron(factors)

    total = weights.sum()
    layer = nn.Linear(weight.shape[1], weight.shape[0], device=phi.device, dtype=torch.float64)
    layer.load_state_dict({"weight": weight, "bias": bias})
    posterior: Any = Laplace(
        layer, "classification", subset_of_weights="all", hessian_structure="kron", backend=LinearSoftmax
    )
    posterior.fit(FeatureLoader(phi, weights))
    output_values, input_values = posterior.H.eigenvalues[0]
    output_vectors, input_vectors = posterior.H.eigenvectors[0]
    return Kfac(input_values, linalg.fix_signs(input_vectors), output_values, linalg.fix_signs(output_vectors))


class FeatureLoader:
    """The part of a ``DataLoader`` that laplace-torch uses: batches, weights for labels, and ``dataset``'s length."""

    def __init__(self, phi: Tensor | FeatureMatrix, weights: Tensor) -> None:
        self.dataset = phi
        self.weights = weights

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk, block in blocks(self.dataset):
            yield block.double(), self.weights[chunk]
