r"""Bayesian linear regression on z: a mean, a noise that may depend on the image, and what the weights leave unknown.

    y = b + wᵀφ + ε,   ε ~ N(0, σ²(φ)),   log σ²(φ) = c + vᵀφ
    w ~ N(m, A⁻¹),   A = β ΦᵀΦ + α I,   b ~ N(ȳ, 1/(β n))            (Bishop 2006, equations 3.53 and 3.54)
    mean = ȳ + mᵀφ,   aleatoric = σ(φ),   epistemic = √(φᵀA⁻¹φ + 1/(β n))

φ are standardised features, n training images.  ``log σ²`` is kept within the range that it has on training images,
because nothing is known of the noise beyond.  Both standard deviations contain one more factor, chosen on selection
images (:mod:`psc_core.tasks.regression.fit.blr`).  Everything stored is in the target's unit.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from psc_core.tasks.regression.heads.base import HeadOutput, RegressionHead


class BayesianLinearHead(RegressionHead):
    """The posterior described above, served in float32.

    ``root`` (D, D) is a square root of A⁻¹, ``R Rᵀ = A⁻¹``, and ``bias_deviation`` is ``1/√(β n)``.
    """

    kind = "blr"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "weight": ("dim",),
        "bias": (),
        "root": ("dim", "dim"),
        "bias_deviation": (),
        "noise_weight": ("dim",),
        "noise_bias": (),
        "log_noise_range": ("two",),
    }
    weight: Tensor
    bias: Tensor
    root: Tensor
    bias_deviation: Tensor
    noise_weight: Tensor
    noise_bias: Tensor
    log_noise_range: Tensor

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Return the mean, and the standard deviations of noise and of the weights."""
        phi = self.standardise(z)
        linear = functional.linear(phi, torch.stack([self.weight, self.noise_weight]))
        log_noise = (linear[:, 1] + self.noise_bias).clamp(self.log_noise_range[0], self.log_noise_range[1])
        variance = (phi @ self.root).square().sum(1) + self.bias_deviation.square()
        return HeadOutput(linear[:, 0] + self.bias, (0.5 * log_noise).exp(), variance.sqrt())
