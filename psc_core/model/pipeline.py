"""The one path from pixels to outputs, which calibration, evaluation and serving share.

::

    uint8 ─▶ standardise ─▶ truncated backbone ─┬▶ early layer ─▶ texture density ─▶ texture ─┐
                                                ├▶ averaged over positions ─┐                 │
                                                └▶ projection ─▶ z ─┬───────┴▶ density ───────┼▶ OOD score ─▶ p-value
                                                                    └▶ head ─▶ p ─▶ entropy ──┘

For a regression the head gives a mean and two standard deviations in place of p, and no gate reads its uncertainty.
It may read earlier layers too, averaged over positions, behind z.

:class:`Scorer` is everything that needs no calibration; :class:`Pipeline` adds the OOD score and its p-value.  The
density reads one of the two, and only a model with the gate ``texture`` an early layer.  Shapes are fixed and nothing
waits for the host, so both can be compiled or captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.calibration.conformal import conformal_p_values
from psc_core.density import Density
from psc_core.errors import NetworkError
from psc_core.gates.gates import TEXTURE, Gates, readings_of
from psc_core.heads import Head, ValueHead, entropy
from psc_core.images.preprocess import Inputs, Pixels, Preprocess, standardise
from psc_core.model.outputs import pack
from psc_core.network.backbone import Backbone, FeaturesAndLogits
from psc_core.network.onnx import OnnxBackbone
from psc_core.precision import Precision
from psc_core.prediction import SCORES
from psc_core.projection.module import Projection
from psc_core.value_prediction import VALUE_SCORES


class Embedding(NamedTuple):
    """What density and head read."""

    z: Float[Tensor, "batch dim"]  # projected features
    head_input: Float[Tensor, "batch _"]  # z, and pooled features of the other layers that the head reads
    density_input: Float[Tensor, "batch _"]  # z itself, or features from :func:`average_positions`
    logits: Float[Tensor, "batch classes"] | None  # of the network, for base predictions
    early: Float[Tensor, "batch _"] | None  # pooled features of the early layer, for the gate "texture"


class Scored(NamedTuple):
    """What is computed without calibration."""

    scores: Mapping[str, Float[Tensor, " batch"]]  # nats; the head's epistemic, and a regression's, in their own unit
    probabilities: Float[Tensor, "batch classes"]  # of no class for a regression


def average_positions(features: Sequence[Float[Tensor, "batch _ _"]]) -> Float[Tensor, "batch channels"]:
    """Features averaged over positions, float32, the layers side by side."""
    return torch.cat([layer.float().mean(2) for layer in features], dim=1)


def read_by_head(
    z: Float[Tensor, "batch dim"], others: Sequence[Float[Tensor, "batch _ _"]]
) -> Float[Tensor, "batch _"]:
    """z and the features of ``others`` averaged over positions, side by side."""
    return torch.cat([z, average_positions(others)], dim=1) if others else z


def ood_score_of(scores: Mapping[str, Tensor], gates: Gates | None) -> Float[Tensor, " batch"]:
    """The score of the gates, or −log density without any, nats; higher is more unusual."""
    return -scores["log_density"] if gates is None else gates.score(readings_of(gates.names, scores))


class Scorer(nn.Module):
    """Pixels to class probabilities, log density and epistemic uncertainty.

    All parts are on one device; a fused backbone is made for it.

    Args:
        preprocess: Its device half is applied here.
        backbone: Truncated network as it runs, see :meth:`psc_core.network.backbone.Backbone.fused`; it keeps the
            network's output for base predictions.
        projection: Features to z.
        density: log p of z, or of features averaged over positions.
        head: g′ on z, or None for the network's own softmax ("base" predictions).  A regression always has one, whose
            standard deviations then stand beside the network's own output.
        precision: ``"fp32"`` or ``"bf16"`` of the backbone; everything after it is float32.
        texture: Density of the pooled features of the backbone's last layer, which is then none of the projection's.
        head_layers: Positions, among the backbone's layers, of those that the head reads beside z.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        preprocess: Preprocess,
        backbone: Backbone | OnnxBackbone,
        projection: Projection,
        density: Density,
        head: Head | ValueHead | None,
        precision: Precision = "fp32",
        texture: Density | None = None,
        head_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        for name, part in zip(("scale", "shift"), preprocess.scale_and_shift(), strict=True):
            self.register_buffer(name, part.to(projection.mean.device), persistent=False)
        self.preprocess = preprocess
        self.backbone = backbone
        self.projection = projection
        self.density = density
        self.head = head
        self.texture = texture
        self.head_layers = tuple(head_layers)
        self.precision = precision
        self.eval().requires_grad_(False)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Of the columns of the packed outputs."""
        return VALUE_SCORES if isinstance(self.head, ValueHead) else SCORES

    def with_backbone(
        self,
        backbone: Backbone | OnnxBackbone,
        texture: Density | None,
        head_layers: Sequence[int] = (),
        precision: Precision | None = None,
    ) -> Scorer:
        """A scorer that shares everything else; the last layer of ``backbone`` is the one that ``texture`` reads."""
        own = (self.projection, self.density, self.head, precision or self.precision)
        return Scorer(self.preprocess, backbone, *own, texture, head_layers)

    def standardise(self, images: Pixels) -> Inputs:
        """The network's input, as :meth:`Preprocess.standardise` with scale and shift on the device already."""
        return standardise(images, self.scale, self.shift)

    def features(self, inputs: Inputs) -> FeaturesAndLogits:
        """Features of each layer, and the logits if the backbone keeps them."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            result: FeaturesAndLogits = self.backbone(inputs)
        return result

    def embed(self, images: Pixels) -> Embedding:
        """What density and head read."""
        features, logits = self.features(self.standardise(images))
        early = None if self.texture is None else average_positions(features[-1:])
        candidate = features[: len(self.projection.positions)]
        z = self.projection(candidate)
        head_input = read_by_head(z, [features[position] for position in self.head_layers])
        density_input = average_positions(candidate) if self.density.input_kind == "pooled" else z
        return Embedding(z, head_input, density_input, None if logits is None else logits.float(), early)

    def score(self, embedding: Embedding) -> Scored:
        """Probabilities and scores from what density and head read.

        Raises:
            NetworkError: There is neither a head nor the network's output.
        """
        log_density = self.density(embedding.density_input).log_density
        scores: dict[str, Tensor]
        if isinstance(self.head, ValueHead):
            mean, aleatoric, deviation = self.head(embedding.head_input)
            probabilities = mean.new_empty(len(mean), 0)
            mean = mean if embedding.logits is None else embedding.logits[:, 0]
            scores = {"mean": mean, "aleatoric": aleatoric, "log_density": log_density, "epistemic": deviation}
            return Scored(scores | self._texture_of(embedding), probabilities)
        if self.head is not None:
            probabilities, epistemic = self.head(embedding.z)
        elif embedding.logits is not None:
            probabilities, epistemic = embedding.logits.softmax(1), torch.zeros_like(log_density)
        else:
            raise NetworkError("a scorer without a head needs a backbone that keeps the network's output")
        scores = {"predictive_entropy": entropy(probabilities), "log_density": log_density, "epistemic": epistemic}
        return Scored(scores | self._texture_of(embedding), probabilities)

    def _texture_of(self, embedding: Embedding) -> dict[str, Tensor]:
        """The reading of the gate "texture", of a model that has it."""
        if self.texture is None or embedding.early is None:
            return {}
        return {TEXTURE: -self.texture(embedding.early).log_density}

    def forward(self, images: Pixels) -> Scored:
        """Probabilities and scores of a batch, the same for an image in any batch."""
        return self.score(self.embed(images))

    def explain(self, embedding: Embedding) -> dict[str, Tensor]:
        """Distances to all classes, the nearest class, whitened deviations, and what the head has to say."""
        explanation = dict(self.density.explain(embedding.density_input)._asdict())
        if isinstance(self.head, Head):
            explanation.update(self.head.decompose(embedding.z)._asdict())
        if isinstance(self.head, ValueHead):
            explanation.update(self.head.explain(embedding.head_input))
        return explanation


class Pipeline(nn.Module):
    """Pixels to packed outputs (:mod:`psc_core.model.outputs`), so that one copy brings them to the host.

    Args:
        scorer: Everything that needs no calibration.
        calibration_scores: ``float32 (n,)`` ascending OOD scores of the calibration images.
        gates: They make the OOD score; without any it is −log density.
    """

    calibration_scores: Tensor

    def __init__(self, scorer: Scorer, calibration_scores: Float[Tensor, " n"], gates: Gates | None = None) -> None:
        super().__init__()
        self.scorer = scorer
        scores = calibration_scores.float().to(scorer.scale.device)
        self.register_buffer("calibration_scores", scores, persistent=False)
        self.gates = None if gates is None else gates.to(scores.device)
        self.eval()

    @property
    def gate_names(self) -> tuple[str, ...]:
        """Names of the gates; none for a model without."""
        return () if self.gates is None else self.gates.names

    @property
    def is_traced(self) -> bool:
        """Whether its network runs as a graph, see :attr:`psc_core.network.backbone.Backbone.is_traced`."""
        return self.scorer.backbone.is_traced

    def with_backbone(self, backbone: Backbone | OnnxBackbone, precision: Precision | None = None) -> Pipeline:
        """A pipeline that shares everything else with this one; by default the precision too."""
        scorer = self.scorer.with_backbone(backbone, self.scorer.texture, self.scorer.head_layers, precision)
        return Pipeline(scorer, self.calibration_scores, self.gates)

    def forward(self, images: Pixels) -> Float[Tensor, "batch columns"]:
        """Packed outputs of a batch, the same for an image in any batch."""
        return self.outputs(self.scorer(images))

    def outputs(self, scored: Scored) -> Float[Tensor, "batch columns"]:
        """Packed outputs: the scores, the probabilities, the p-values of the gates."""
        if self.gates is None:
            ood_score, of_gates = -scored.scores["log_density"], []
        else:
            readings = readings_of(self.gates.names, scored.scores)
            ood_score, of_gates = self.gates.score(readings), [self.gates.p_values(readings)]
        p_value = conformal_p_values(self.calibration_scores, ood_score)
        scores = {**scored.scores, "ood_score": ood_score, "ood_p_value": p_value}
        return pack(scores, scored.probabilities, of_gates, self.scorer.score_names)

    def explain(self, images: Pixels) -> tuple[Float[Tensor, "batch columns"], dict[str, Tensor]]:
        """Packed outputs and their explanation, see :meth:`Scorer.explain`, from one pass."""
        embedding = self.scorer.embed(images)
        explanation = self.scorer.explain(embedding)
        return self.outputs(self.scorer.score(embedding)), explanation
