"""Bayesian logistic regression by a Kronecker-factored (KFAC) Laplace approximation, in closed form.

The paper's g′ (section 4.3 and appendix A.3).  Around the maximum a posteriori weights, the posterior of
``logits = W φ + b`` is Gaussian with precision (Ritter et al. 2018; weights and bias are separate blocks, as
in laplace-torch, which fits it)

    weights  ``B ⊗ A + τ I``,   bias  ``B + τ I``,
    ``A = (1/n) Σ_i φ_i φ_iᵀ``,   ``B = Σ_i (diag p_i − p_i p_iᵀ)``,

sums over n images: of the labelled examples of one image each counts as a fraction of it.

With ``A = Q_A diag(λ_A) Q_Aᵀ`` and ``B = Q_B diag(λ_B) Q_Bᵀ`` the logits of one image have covariance
``Q_B diag(v) Q_Bᵀ``, where

    ``v_j = Σ_i (Q_Aᵀ φ)_i² / (λ_Ai λ_Bj + τ) + 1 / (λ_Bj + τ)``        (the last term: the bias)

so a batch takes three matrix products, ``s_c² = Σ_j (Q_B)²_cj v_j`` is the variance of a logit, and a sample
of the logits is ``μ + Q_B (√v ∘ ε)``.  No Jacobian is ever formed: the two factors are sums of outer products.

The logits are divided by a temperature T (:mod:`.softmax`): the stored W and b by T, v by T², so
that all below belongs to one posterior.

Probabilities: laplace-torch's probit approximation, ``softmax(μ_c / √(1 + π s_c² / 8))``.

Epistemic uncertainty, nats: the mutual information between label and weights.  To second order in the
logits' covariance it is ``δ = ½ tr[(diag p − p pᵀ) Q_B diag(v) Q_Bᵀ]``, which is unbounded, while the mutual
information cannot exceed the entropy H of p; so ``H (1 − exp(−δ / H))`` is reported, which is δ where δ ≪ H and at
most H; served is at most the entropy of the served probabilities.  Aleatoric is the rest of the latter, so both sum
to the predictive entropy that is served.

Here p (and H, its entropy) is the probit approximation with the variance of the *centred* logits,
``s_c² = Σ_j (Q_B − mean_c Q_B)²_cj v_j``.  A constant added to all logits changes no probability and
B has no curvature in that direction, so its posterior variance is the prior's.  The plain probit approximation counts
that variance, which flattens probabilities and would inflate the mutual information several times.  (What it adds to
the served entropy therefore counts as aleatoric.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from psc_core import linalg
from psc_core.features import FeatureMatrix, blocks
from psc_core.heads.base import (
    ClassifierData,
    ClassifierHead,
    ClassifierOutput,
    Scored,
    UncertaintyDecomposition,
    entropy,
    score_classes,
)
from psc_core.heads.softmax import choose_posterior, choose_softmax


class LaplaceHead(ClassifierHead):
    """The posterior described above, served in float32.

    The matrices of its three products are prepared once, with the operations before and after each folded in:

    * ``inner`` (D, K + D): from z − center to μ and ``φ Q_A``;
    * ``outer`` (D, 3 K): from the squares of ``φ Q_A`` to v, and to the squared divisors of the logits,
      ``1 + (π/8) Σ_j Q[c,j]² v_j`` for Q = ``Q_B`` and for its centred columns;
    * ``spread_terms`` (K, 2 K): ``−Q_B² / 2`` beside ``Q_B / √2``.
    """

    kind = "laplace"
    epistemic_unit = "nats (mutual information of label and weights)"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "weight": ("classes", "dim"),
        "bias": ("classes",),
        "input_vectors": ("dim", "dim"),
        "output_vectors": ("classes", "classes"),
        "weight_spectrum": ("dim", "classes"),
        "bias_spectrum": ("classes",),
    }

    @classmethod
    def fit(cls, data: ClassifierData) -> LaplaceHead:
        """Fit weights, their posterior and its temperature; the posterior of the logits divided by T is stored."""
        softmax = choose_softmax(
            data.train, data.train_labels, data.selection, data.selection_labels, num_classes=data.num_classes
        )
        kfac = fit_kfac(softmax.weight, softmax.bias, data.train, data.weights)
        logits, variance_with = softmax.logits(data.selection), logit_variance(kfac, data.selection)
        choice = choose_posterior(logits, variance_with, data.selection_labels, prior_precision=softmax.prior_precision)
        weight_spectrum, bias_spectrum = (part / choice.temperature**2 for part in kfac.spectra(choice.prior_precision))
        return cls(
            {
                **data.standardisation._asdict(),
                **softmax.divided_by(choice.temperature),
                "input_vectors": kfac.input_vectors,
                "output_vectors": kfac.output_vectors,
                "weight_spectrum": weight_spectrum,
                "bias_spectrum": bias_spectrum,
            },
            record=choice.record(softmax),
        )

    def __init__(self, tensors: Mapping[str, Tensor], *, record: Mapping[str, float | int]) -> None:
        super().__init__(tensors, record=record)
        wide = {name: getattr(self, name).double() for name in self.layout}
        inner = wide["inverse_scale"][:, None] * torch.cat([wide["weight"].T, wide["input_vectors"]], dim=1)
        vectors = wide["output_vectors"]
        plain, centred = vectors.square(), (vectors - vectors.mean(dim=0)).square()
        spread = torch.cat(
            [torch.eye(len(vectors)).to(vectors), (math.pi / 8.0) * torch.cat([plain, centred]).T], dim=1
        )
        outer_offset = wide["bias_spectrum"] @ spread
        outer_offset[len(vectors) :] += 1.0
        derived = {
            "inner": inner,
            "inner_offset": functional.pad(wide["bias"], (0, len(inner))),
            "outer": wide["weight_spectrum"] @ spread,
            "outer_offset": outer_offset,
            "spread_terms": torch.cat([-0.5 * plain, math.sqrt(0.5) * vectors], dim=1),
        }
        for name, tensor in derived.items():
            self.register_buffer(name, tensor.float().contiguous(), persistent=False)

    def posterior(
        self, z: Float[Tensor, "batch dim"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Return probit probabilities, their entropy, and the mutual information of label and weights.

        The last is at most the entropy of the centred probabilities.
        """
        classes = len(self.bias)
        inner = torch.addmm(self.inner_offset, z - self.center, self.inner)  # folded in, the center would cancel
        mean = inner[:, :classes]
        outer = torch.addmm(self.outer_offset, inner[:, classes:].square(), self.outer)
        v, shrink = outer[:, :classes], outer[:, classes:].rsqrt().view(-1, 2, classes)
        both = (mean[:, None] * shrink).softmax(dim=2)
        probabilities, p = both.unbind(1)
        squares, vectors = (p @ self.spread_terms).chunk(2, dim=1)
        minus_delta = torch.addcmul(squares, vectors, vectors).clamp_(max=0.0).mul_(v).sum(dim=1)
        served, total = entropy(both).unbind(1)
        fraction = (minus_delta / total.clamp(min=torch.finfo(total.dtype).tiny)).exp_()
        return probabilities, served, torch.addcmul(total, total, fraction, value=-1.0)

    def forward(self, z: Float[Tensor, "batch dim"]) -> ClassifierOutput:
        probabilities, _, information = self.posterior(z)
        return ClassifierOutput(probabilities, information)

    def decompose(self, z: Float[Tensor, "batch dim"]) -> UncertaintyDecomposition:
        _, total, information = self.posterior(z)
        epistemic = torch.minimum(information, total)
        return UncertaintyDecomposition(total - epistemic, epistemic)

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        probabilities, total, information = self.posterior(features)
        return score_classes(probabilities, information.clamp_(max=total), total)


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


def logit_variance(kfac: Kfac, phi: Float[Tensor, "m dim"]) -> Callable[[float], Tensor]:
    """Return ``s_c²`` of the selection examples, (m, classes), as a function of τ."""
    inputs = (phi @ kfac.input_vectors.to(phi.dtype)).square()
    outputs = kfac.output_vectors.to(phi.dtype).square().T

    def variance_with(prior_precision: float) -> Tensor:
        weights, biases = (part.to(phi.dtype) for part in kfac.spectra(prior_precision))
        return (inputs @ weights + biases) @ outputs

    return variance_with
