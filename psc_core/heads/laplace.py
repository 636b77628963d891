"""Bayesian logistic regression by a Kronecker-factored (KFAC) Laplace approximation, in closed form.

The paper's g′ (section "Linear layers as PSCs").  Around the maximum a posteriori weights, the posterior of
``logits = W φ + b`` is Gaussian with precision (Ritter et al. 2018; weights and bias are separate blocks, as
in laplace-torch, which fits it)

    weights  ``B ⊗ A + τ I``,   bias  ``B + τ I``,
    ``A = (1/n) Σ_i φ_i φ_iᵀ``,   ``B = Σ_i (diag p_i − p_i p_iᵀ)``.

With ``A = Q_A diag(λ_A) Q_Aᵀ`` and ``B = Q_B diag(λ_B) Q_Bᵀ`` the logits of one image have covariance
``Q_B diag(v) Q_Bᵀ``, where

    ``v_j = Σ_i (Q_Aᵀ φ)_i² / (λ_Ai λ_Bj + τ) + 1 / (λ_Bj + τ)``        (the last term: the bias)

so a batch takes three matrix products, ``s_c² = Σ_j (Q_B)²_cj v_j`` is the variance of a logit, and a sample
of the logits is ``μ + Q_B (√v ∘ ε)``.  No Jacobian is ever formed: the two factors are sums of outer products.

Probabilities: laplace-torch's probit approximation, ``softmax(μ_c / √(1 + π s_c² / 8))``, with μ divided by a
temperature (:func:`psc_core.heads.fit.posterior.choose_posterior`), which the stored W and b include.

Epistemic uncertainty, nats: the mutual information between label and weights.  To second order in the
logits' covariance it is ``δ = ½ tr[(diag p − p pᵀ) Q_B diag(v) Q_Bᵀ]``, which is unbounded, while the mutual
information cannot exceed the predictive entropy H; so ``H (1 − exp(−δ / H))`` is reported, which is δ where δ ≪ H
and at most H.  Aleatoric is the rest of H.

Here p (and H, its entropy) is the probit approximation with the variance of the *centred* logits,
``s_c² = Σ_j (Q_B − mean_c Q_B)²_cj v_j``.  A constant added to all logits changes no probability and
B has no curvature in that direction, so its posterior variance is the prior's.  The plain probit approximation counts
that variance, which flattens probabilities and would inflate the mutual information several times.
:meth:`LaplaceHead.sample` estimates the same quantities by Monte Carlo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from psc_core.heads.base import Head, HeadOutput, Split, entropy


class MonteCarlo(NamedTuple):
    """Averages over samples of the logits; entropies in nats.

    Attributes:
        probabilities: Mean of the sampled softmax.
        predictive_entropy: Entropy of ``probabilities``.
        aleatoric: Mean entropy of the sampled softmax.
        mutual_information: ``predictive_entropy − aleatoric``.
    """

    probabilities: Float[Tensor, "batch classes"]
    predictive_entropy: Float[Tensor, " batch"]
    aleatoric: Float[Tensor, " batch"]
    mutual_information: Float[Tensor, " batch"]


class LaplaceHead(Head):
    """The posterior of the module's text, served in float32.

    The matrices of its three products are prepared once, with the operations before and after each folded in:

    * ``inner`` (D, K + D): from z to μ and ``φ Q_A``;
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
    weight: Tensor
    bias: Tensor
    input_vectors: Tensor
    output_vectors: Tensor
    weight_spectrum: Tensor
    bias_spectrum: Tensor
    inner: Tensor
    inner_offset: Tensor
    outer: Tensor
    outer_offset: Tensor
    spread_terms: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], *, record: Mapping[str, float | int]) -> None:
        super().__init__(tensors, record=record)
        wide = {name: getattr(self, name).double() for name in self.layout}
        inner = wide["inverse_scale"][:, None] * torch.cat([wide["weight"].T, wide["input_vectors"]], dim=1)
        inner_offset = functional.pad(wide["bias"], (0, len(inner))) - wide["center"] @ inner
        vectors = wide["output_vectors"]
        plain, centred = vectors.square(), (vectors - vectors.mean(dim=0)).square()
        spread = torch.cat(
            [torch.eye(len(vectors)).to(vectors), (math.pi / 8.0) * torch.cat([plain, centred]).T], dim=1
        )
        outer_offset = wide["bias_spectrum"] @ spread
        outer_offset[len(vectors) :] += 1.0
        derived = {
            "inner": inner,
            "inner_offset": inner_offset,
            "outer": wide["weight_spectrum"] @ spread,
            "outer_offset": outer_offset,
            "spread_terms": torch.cat([-0.5 * plain, math.sqrt(0.5) * vectors], dim=1),
        }
        for name, tensor in derived.items():
            self.register_buffer(name, tensor.float().contiguous(), persistent=False)

    def logits(
        self, z: Float[Tensor, "batch dim"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes"], Float[Tensor, "batch two_classes"]]:
        """Mean μ of the logits, the variances v along the columns of ``output_vectors``, and the divisors' squares."""
        classes = len(self.bias)
        inner = torch.addmm(self.inner_offset, z, self.inner)
        outer = torch.addmm(self.outer_offset, inner[:, classes:].square(), self.outer)
        return inner[:, :classes], outer[:, :classes], outer[:, classes:]

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Probit probabilities and mutual information in nats."""
        mean, v, widening = self.logits(z)
        probabilities, centred = self._probit(mean, widening)
        total, fraction = self._split(centred, v)
        return HeadOutput(probabilities, torch.addcmul(total, total, fraction, value=-1.0))

    def split(self, z: Float[Tensor, "batch dim"]) -> Split:
        """Both in nats; their sum is H of the module's text."""
        mean, v, widening = self.logits(z)
        total, fraction = self._split(self._probit(mean, widening)[1], v)
        return Split(total * fraction, torch.addcmul(total, total, fraction, value=-1.0))

    def sample(self, z: Float[Tensor, "batch dim"], samples: int, *, seed: int) -> MonteCarlo:
        """Monte-Carlo predictive from the full K × K covariance of each image's logits.

        Args:
            z: Feature vectors.
            samples: Number of draws; memory does not grow with it.
            seed: Of the random numbers, which depend on the device.
        """
        mean, v, _ = self.logits(z)
        generator = torch.Generator(device=z.device).manual_seed(seed)
        probabilities, aleatoric = torch.zeros_like(mean), mean.new_zeros(len(mean))
        for _ in range(samples):
            noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            drawn = (mean + (v.sqrt() * noise) @ self.output_vectors.T).softmax(dim=1)
            probabilities += drawn / samples
            aleatoric += entropy(drawn) / samples
        total = entropy(probabilities)
        return MonteCarlo(probabilities, total, aleatoric, total - aleatoric)

    @staticmethod
    def _probit(
        mean: Float[Tensor, "batch classes"], widening: Float[Tensor, "batch two_classes"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes"]]:
        """Probit probabilities with the variances of the logits, and with those of the centred logits."""
        shrink = widening.rsqrt().view(-1, 2, mean.shape[1])
        plain, centred = (mean[:, None] * shrink).softmax(dim=2).unbind(1)
        return plain, centred

    def _split(
        self, p: Float[Tensor, "batch classes"], v: Float[Tensor, "batch classes"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """H of the centred probabilities, and its aleatoric fraction exp(−δ / H)."""
        squares, vectors = (p @ self.spread_terms).chunk(2, dim=1)
        minus_delta = torch.addcmul(squares, vectors, vectors).clamp_(max=0.0).mul_(v).sum(dim=1)
        total = entropy(p)
        return total, (minus_delta / total.clamp(min=torch.finfo(total.dtype).tiny)).exp_()
