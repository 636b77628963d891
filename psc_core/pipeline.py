"""The one path from pixels to uncertainty that fitting, evaluation and serving share.

    uint8 (B, C, H, W) ─▶ standardise ─▶ truncated backbone ─▶ projection ─▶ z ─┬▶ density ─▶ log p(z), p-value
                                                                             └▶ head ─▶ probabilities, entropy

One module, fixed shapes in and out, no host synchronisation: it can be compiled or captured in a CUDA
graph.  The answer is one packed ``float32`` matrix, so one copy brings it to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from psc_core.backbone import Backbone
from psc_core.calibration import conformal_p_values
from psc_core.density import Density
from psc_core.heads import Head
from psc_core.preprocess import Preprocess
from psc_core.projection import Projection

PRECISIONS = ("fp32", "bf16")


class Outputs(NamedTuple):
    """What one image is told, as tensors over the batch.

    Attributes:
        probabilities: (B, K) class probabilities.
        predictive_entropy: (B,) entropy of the probabilities, nats.
        log_density: (B,) log p(z), nats; higher is more like the training data.
        ood_p_value: (B,) share of calibration images at least as unusual, in (0, 1].
        epistemic: (B,) the head's own epistemic uncertainty, in the head's unit (0 for base predictions).
    """

    probabilities: Tensor
    predictive_entropy: Tensor
    log_density: Tensor
    ood_p_value: Tensor
    epistemic: Tensor

    def pack(self) -> Float[Tensor, "batch columns"]:
        """One matrix (B, 4 + K): entropy, log density, p-value, epistemic, probabilities."""
        columns = torch.stack([self.predictive_entropy, self.log_density, self.ood_p_value, self.epistemic], dim=1)
        return torch.cat([columns, self.probabilities], dim=1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "batch columns"]) -> Outputs:
        """Views into a packed matrix; inverse of :meth:`pack`."""
        return cls(packed[:, 4:], packed[:, 0], packed[:, 1], packed[:, 2], packed[:, 3])


def entropy(probabilities: Float[Tensor, "batch classes"]) -> Float[Tensor, "batch"]:
    """−Σ p log p in nats, 0 log 0 = 0."""
    result: Tensor = torch.special.entr(probabilities).sum(1)
    return result


class Pipeline(nn.Module):
    """Pixels to packed :class:`Outputs`.

    Args:
        preprocess: Device half is applied here.
        backbone: Truncated network; keeps the network's output when ``head`` is None.
        projection: Features to z.
        density: log p(z).
        head: g′ on z, or None to serve the network's own softmax ("base" predictions).
        calibration_scores: ``float32 (n,)`` ascending log densities of the calibration images; empty before
            calibration, when every p-value is 1.
        precision: ``"fp32"`` or ``"bf16"`` of the backbone; everything after it is float32.
    """

    scale: Tensor
    shift: Tensor
    calibration_scores: Tensor

    def __init__(
        self,
        preprocess: Preprocess,
        backbone: Backbone,
        projection: Projection,
        density: Density,
        head: Head | None,
        calibration_scores: Float[Tensor, "n"],
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        scale, shift = preprocess.scale_and_shift()
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("calibration_scores", calibration_scores.float(), persistent=False)
        self.backbone = backbone
        self.projection = projection
        self.density = density
        self.head = head
        self.precision = precision
        self.eval().requires_grad_(False)

    def embed(self, images: UInt8[Tensor, "batch channels height width"]) -> tuple[Tensor, Tensor | None]:
        """z (B, D) and, for base predictions, the network's logits (B, K)."""
        inputs = images.float() * self.scale + self.shift
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            features, logits = self.backbone(inputs)
        return self.projection(features), None if logits is None else logits.float()

    def forward(self, images: UInt8[Tensor, "batch channels height width"]) -> Float[Tensor, "batch columns"]:
        """Packed :class:`Outputs` of a batch; identical for an image whatever it is batched with."""
        z, logits = self.embed(images)
        log_density = self.density(z).log_density
        if self.head is not None:
            probabilities, epistemic = self.head(z)
        elif logits is not None:
            probabilities, epistemic = logits.softmax(1), torch.zeros_like(log_density)
        else:
            raise RuntimeError("a pipeline without a head needs a backbone that keeps its output")
        p_value = conformal_p_values(self.calibration_scores, log_density)
        return Outputs(probabilities, entropy(probabilities), log_density, p_value, epistemic).pack()

    def explain(self, images: UInt8[Tensor, "batch channels height width"]) -> dict[str, Tensor]:
        """Why: distances to all classes, the nearest, whitened deviations, aleatoric and epistemic nats."""
        z, _ = self.embed(images)
        explanation = dict(self.density.explain(z)._asdict())
        if self.head is not None:
            explanation.update(self.head.split(z)._asdict())
        return explanation
