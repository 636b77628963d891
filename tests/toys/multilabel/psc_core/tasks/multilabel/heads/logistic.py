"""Logistic regression of each label: ``p_k = sigmoid(w_kᵀφ + b_k)``; epistemic: ``‖φ‖² / D``, 1 on training images."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.multilabel.heads.base import MultilabelHead, MultilabelOutput


class LogisticHead(MultilabelHead):
    """The head of the module's text."""

    kind = "logistic"
    epistemic_unit = "mean squared deviation of the features"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "weight": ("labels", "dim"),
        "bias": ("labels",),
    }
    weight: Tensor
    bias: Tensor

    def forward(self, z: Float[Tensor, "batch dim"]) -> MultilabelOutput:
        """Return the probability of each label, and how far the features are from their mean."""
        phi = self.standardise(z)
        return MultilabelOutput((phi @ self.weight.T + self.bias).sigmoid(), phi.square().mean(1))
