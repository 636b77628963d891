"""The one path from pixels to uncertainty that fitting, evaluation and serving share.

    uint8 (B, C, H, W) ─▶ standardise ─▶ truncated backbone ─▶ projection ─▶ z ─┬▶ density ─▶ log p(z) ─┐
                                                                                │                       ├▶ p-value
                                                                                └▶ head ─▶ p ─▶ entropy ─┘

One module, fixed shapes in and out, no host synchronisation: it can be compiled or captured in a CUDA
graph.  The answer is one packed ``float32`` matrix, so one copy brings it to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from psc_core.calibration.conformal import conformal_p_values
from psc_core.density import Density
from psc_core.heads import Head, entropy
from psc_core.images.preprocess import Preprocess
from psc_core.network.backbone import Backbone
from psc_core.projection.module import Projection

PRECISIONS = ("fp32", "bf16")

SCORES: Final = 5
"""Columns of a packed row before its probabilities."""

PREDICTIVE_ENTROPY, LOG_DENSITY, OOD_P_VALUE, EPISTEMIC, OOD_SCORE = range(SCORES)
"""Which they are; see :class:`Outputs`."""


class Outputs(NamedTuple):
    """What one image is told, as tensors over the batch.

    Attributes:
        probabilities: (B, K) class probabilities.
        predictive_entropy: (B,) entropy of the probabilities, nats.
        log_density: (B,) log p(z), nats; higher is more like the training data.
        ood_p_value: (B,) share of calibration images at least as unusual, in (0, 1].
        epistemic: (B,) the head's own epistemic uncertainty, in the head's unit (0 for base predictions).
        ood_score: (B,) what the p-value ranks, higher is more out-of-distribution: −log p(z) + w · entropy, with
            the pipeline's ``entropy_weight`` w.
    """

    probabilities: Tensor
    predictive_entropy: Tensor
    log_density: Tensor
    ood_p_value: Tensor
    epistemic: Tensor
    ood_score: Tensor

    def pack(self) -> Float[Tensor, "batch columns"]:
        """One matrix (B, SCORES + K): entropy, log density, p-value, epistemic, OOD score, probabilities."""
        columns = (self.predictive_entropy, self.log_density, self.ood_p_value, self.epistemic, self.ood_score)
        return torch.cat([*(column[:, None] for column in columns), self.probabilities], dim=1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "batch columns"]) -> Outputs:
        """Views into a packed matrix; inverse of :meth:`pack`."""
        return cls(packed[:, SCORES:], *packed[:, :SCORES].unbind(1))


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
    """Pixels to packed :class:`Outputs`.

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
        self.backbone = backbone
        self.projection = projection
        self.density = density
        self.head = head
        self.precision = precision
        self.entropy_weight = entropy_weight
        self._fused: tuple[Backbone, ...] = ()
        self.eval().requires_grad_(False)

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
        """Packed :class:`Outputs` of a batch; identical for an image whatever it is batched with."""
        return self.judge(self.embed(images))

    def judge(self, embedding: Embedding) -> Float[Tensor, "batch columns"]:
        """Packed :class:`Outputs` from what density and head read."""
        z, read, logits = embedding
        log_density = self.density(read).log_density
        if self.head is not None:
            probabilities, epistemic = self.head(z)
        elif logits is not None:
            probabilities, epistemic = logits.softmax(1), torch.zeros_like(log_density)
        else:
            raise RuntimeError("a pipeline without a head needs a backbone that keeps its output")
        return self.outputs(probabilities, log_density, epistemic).pack()

    def outputs(
        self,
        probabilities: Float[Tensor, "batch classes"],
        log_density: Float[Tensor, "batch"],
        epistemic: Float[Tensor, "batch"],
    ) -> Outputs:
        """Entropy, OOD score and p-value added to what head and density say."""
        uncertainty = entropy(probabilities)
        ood_score = self.entropy_weight * uncertainty - log_density if self.entropy_weight else -log_density
        p_value = conformal_p_values(self.calibration_scores, ood_score)
        return Outputs(probabilities, uncertainty, log_density, p_value, epistemic, ood_score)

    def explain(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch columns"], dict[str, Tensor]]:
        """Packed outputs, and why: distances to all classes, the nearest, whitened deviations, what the head splits."""
        embedding = self.embed(images)
        explanation = dict(self.density.explain(embedding.read)._asdict())
        if self.head is not None:
            explanation.update(self.head.split(embedding.z)._asdict())
        return self.judge(embedding), explanation
