"""The one path from pixels to uncertainty that fitting, evaluation and serving share.

    uint8 (B, C, H, W) ─▶ standardise ─▶ truncated backbone ─▶ projection ─▶ z ─┬▶ density ─▶ log p(z) ─┐
                                                                                │                       ├▶ p-value
                                                                                └▶ head ─▶ p ─▶ entropy ─┘

One module, fixed shapes in and out, no host synchronisation: it can be compiled or captured in a CUDA
graph.  The answer is one packed ``float32`` matrix, so one copy brings it to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from psc_core.calibration.conformal import conformal_p_values
from psc_core.density import Density
from psc_core.heads import Head, entropy
from psc_core.images.preprocess import Preprocess
from psc_core.model.outputs import pack
from psc_core.network.backbone import Backbone
from psc_core.projection.module import Projection

PRECISIONS = ("fp32", "bf16")


class Embedding(NamedTuple):
    """What density and head read.

    Attributes:
        z: (B, D) projected features, which the head reads.
        read: What the density reads: z itself, or (B, C) from :func:`pool`.
        logits: (B, K) of the network, for base predictions.
    """

    z: Tensor
    read: Tensor
    logits: Tensor | None


def pool(features: Sequence[Float[Tensor, "batch _ _"]]) -> Float[Tensor, "batch channels"]:
    """Features averaged over positions, float32, the layers side by side."""
    return torch.cat([layer.float().mean(2) for layer in features], dim=1)


class Pipeline(nn.Module):
    """Pixels to packed outputs.

    Args:
        preprocess: Device half is applied here.
        backbone: Truncated network; keeps the network's output when ``head`` is None.
        projection: Features to z.
        density: log p(z).
        head: g′ on z, or None to serve the network's own softmax ("base" predictions).
        calibration_scores: ``float32 (n,)`` ascending OOD scores of the calibration images; empty before
            calibration, when every p-value is 1.
        precision: ``"fp32"`` or ``"bf16"`` of the backbone; everything after it is float32.
        entropy_weight: What a nat of predictive entropy adds to the OOD score; 0 is the density alone.
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
        entropy_weight: float = 0.0,
    ) -> None:
        super().__init__()
        scale, shift = preprocess.scale_and_shift()
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("calibration_scores", calibration_scores.float(), persistent=False)
        self.preprocess = preprocess
        self.backbone = backbone
        self.projection = projection
        self.density = density
        self.head = head
        self.precision = precision
        self.entropy_weight = entropy_weight
        self._fused: tuple[Backbone, ...] = ()
        self.eval().requires_grad_(False)

    def calibrated(self, scores: Float[Tensor, "n"], *, entropy_weight: float) -> Pipeline:
        """The same pipeline with these calibration scores and this weight; nothing is copied."""
        parts = (self.preprocess, self.backbone, self.projection, self.density, self.head)
        return Pipeline(*parts, scores, self.precision, entropy_weight).to(self.scale.device)

    @property
    def concurrent(self) -> bool:
        """Whether several threads may call it at once; a network cut by hooks keeps features of one call."""
        return self.backbone.method == "graph"

    def running(self) -> Backbone:
        """What computes the features: the backbone with fewer operations, made at the first call on a device."""
        if not self._fused:
            self._fused = (self.backbone.fused(self.precision),)
        return self._fused[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        self._fused = ()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fused": ()}  # a copy makes its own

    def features(
        self, inputs: Float[Tensor, "batch channels height width"]
    ) -> tuple[list[Float[Tensor, "batch _ _"]], Float[Tensor, "batch classes"] | None]:
        """Features a layer of standardised images, and the logits when they are kept, as they are served."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            result: tuple[list[Tensor], Tensor | None] = self.running()(inputs)
        return result

    def embed(self, images: UInt8[Tensor, "batch channels height width"]) -> Embedding:
        """What density and head read."""
        features, logits = self.features(images.float().mul_(self.scale).add_(self.shift))
        z = self.projection(features)
        read = pool(features) if self.density.reads == "pooled" else z
        return Embedding(z, read, None if logits is None else logits.float())

    def forward(self, images: UInt8[Tensor, "batch channels height width"]) -> Float[Tensor, "batch columns"]:
        """Packed outputs of a batch (:mod:`psc_core.model.outputs`), the same for an image in any batch."""
        return self.outputs(self.embed(images))

    def outputs(self, embedding: Embedding) -> Float[Tensor, "batch columns"]:
        """Packed outputs from what density and head read: every score of :data:`psc_core.prediction.SCORES`."""
        z, read, logits = embedding
        log_density = self.density(read).log_density
        if self.head is not None:
            probabilities, epistemic = self.head(z)
        elif logits is not None:
            probabilities, epistemic = logits.softmax(1), torch.zeros_like(log_density)
        else:
            raise RuntimeError("a pipeline without a head needs a backbone that keeps its output")
        predictive_entropy = entropy(probabilities)
        ood_score = self.entropy_weight * predictive_entropy - log_density if self.entropy_weight else -log_density
        scores = {
            "predictive_entropy": predictive_entropy,
            "log_density": log_density,
            "ood_score": ood_score,
            "ood_p_value": conformal_p_values(self.calibration_scores, ood_score),
            "epistemic": epistemic,
        }
        return pack(scores, probabilities)

    def explain(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch columns"], dict[str, Tensor]]:
        """Packed outputs, and why: distances to all classes, the nearest, whitened deviations, what the head splits."""
        embedding = self.embed(images)
        explanation = dict(self.density.explain(embedding.read)._asdict())
        if self.head is not None:
            explanation.update(self.head.split(embedding.z)._asdict())
        return self.outputs(embedding), explanation
