"""The one path from pixels to outputs, shared by calibration, evaluation and serving.

::

    uint8 ─▶ standardise ─▶ truncated backbone ─┬▶ early layer ─▶ texture density ─▶ texture ─┐
                                                ├▶ averaged over positions ─┐                 │
                                                └▶ projection ─▶ z ─┬───────┴▶ density ───────┼▶ OOD score ─▶ p-value
                                                                    └▶ head ─▶ p, energy ─────┘

Floating-point images are already the network's inputs and enter after ``standardise``.

The outputs of the head depend on the task: a regression has a mean and two standard deviations instead of p, and no
gate reads its uncertainty.  Besides z the head may also read earlier layers, averaged over positions.

:class:`Scorer` does everything that needs no calibration; :class:`Pipeline` adds the OOD score and its p-value.  The
density reads either z or the averaged features, and only a model with the gate ``texture`` or a map reads an early
layer.  Shapes are fixed and nothing waits for the host, so both can be compiled or captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from psc_core.calibration.conformal import conformal_p_values
from psc_core.compute.device import autocast
from psc_core.density.base import Density
from psc_core.errors import UsageError
from psc_core.gates.combined import TEXTURE, Gates, readings_of
from psc_core.images.preprocess import Images, Inputs, Preprocess, standardise
from psc_core.maps.layer_map import LayerMap
from psc_core.network.backbone import Backbone, FeaturesAndOutput
from psc_core.precision import Precision
from psc_core.projection.module import Projection
from psc_core.tasks.head import Head, Scored
from psc_core.tasks.outputs import pack
from psc_core.thumbnails.thumbnails import Nearest, Thumbnails

MAP: Final = "map"
"""The name of the map in an explanation."""

NO_MAP: Final = "the model has no map; fit it again with gates, and a network whose early layers have rows and columns"


class Embedding(NamedTuple):
    """The inputs of the density and the head."""

    z: Float[Tensor, "batch dim"]  # projected features
    head_input: Float[Tensor, "batch _"]  # z, with the averaged features of the other layers that the head reads
    density_input: Float[Tensor, "batch _"]  # z itself, or the candidate's averaged features
    output: Float[Tensor, "batch outputs"] | None  # the network's own output, for base predictions
    early: Float[Tensor, "batch _"] | None  # averaged features of the early layer, for the gate "texture"


def average_positions(features: Float[Tensor, "batch channels _"]) -> Float[Tensor, "batch channels"]:
    """Average a layer's features over positions in float32."""
    return features.float().mean(2)


def _joined(parts: Sequence[Float[Tensor, "batch _"]]) -> Float[Tensor, "batch _"]:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def ood_score_of(
    scores: Mapping[str, Tensor], gates: Gates | None
) -> tuple[Float[Tensor, " batch"], list[Float[Tensor, "batch gates"]]]:
    """Return the OOD score of the gates, in nats, and their p-values; without gates −log density and no p-values."""
    if gates is None:
        return -scores["log_density"], []
    readings = readings_of(gates.names, scores)
    return gates.score(readings), [gates.p_values(readings)]


@dataclass(frozen=True)
class ScorerParts:
    """The parts of a :class:`Scorer`, all on one device, for which the backbone has been fused.

    Attributes:
        preprocess: The preprocessing, of which a scorer applies the device half.
        backbone: The truncated network as it runs, see :meth:`psc_core.network.backbone.Backbone.fused`; for base
            predictions it also returns the network's output.
        projection: The projection from features to z.
        density: log p of z, or of features averaged over positions.
        head: g′ on z, or for base predictions a head on the network's own output.
        texture: The density of the averaged features of the backbone's last layer, which then is not a candidate layer.
        head_layers: The names of the backbone's layers that the head reads besides z.
    """

    preprocess: Preprocess
    backbone: Backbone
    projection: Projection
    density: Density
    head: Head
    texture: Density | None = None
    head_layers: tuple[str, ...] = ()


class Scorer(nn.Module):
    """Computes the scores of the task, the log density, and the probabilities if there are any, from pixels.

    Its attributes have the names of its parts.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, parts: ScorerParts) -> None:
        super().__init__()
        for name, part in zip(("scale", "shift"), parts.preprocess.scale_and_shift(), strict=True):
            self.register_buffer(name, part.to(parts.projection.mean.device), persistent=False)
        self.parts = parts
        self.preprocess = parts.preprocess
        self.backbone = parts.backbone
        self.projection = parts.projection
        self.density = parts.density
        self.head = parts.head
        self.texture = parts.texture
        self.head_layers = parts.head_layers
        self.eval().requires_grad_(False)

    @property
    def precision(self) -> Precision:
        """The precision of the backbone, ``"fp32"`` or ``"bf16"``; everything after it is float32."""
        return self.backbone.precision

    def with_backbone(self, backbone: Backbone, texture: Density | None) -> Scorer:
        """Return a scorer with another backbone, whose last layer ``texture`` reads; it shares everything else."""
        return Scorer(replace(self.parts, backbone=backbone, texture=texture))

    def with_head(self, head: Head) -> Scorer:
        """Return a scorer with another head; it shares everything else."""
        return Scorer(replace(self.parts, head=head.to(self.scale.device)))

    def with_densities(self, density: Density, texture: Density | None) -> Scorer:
        """Return a scorer with other densities; it shares everything else.  Keep ``texture`` None if it was."""
        return Scorer(replace(self.parts, density=density, texture=texture)).to(self.scale.device)

    def standardise(self, images: Images) -> Inputs:
        """Standardise as :meth:`Preprocess.standardise`, with scale and shift already on the device."""
        return standardise(images, self.scale, self.shift)

    def features(self, inputs: Inputs) -> FeaturesAndOutput:
        """Return the features of each layer, and the logits if the backbone keeps them."""
        with autocast(inputs.device, self.precision):
            result: FeaturesAndOutput = self.backbone(inputs)
        return result

    def embed(self, images: Images) -> Embedding:
        """Return the inputs of the density and the head for a batch of images."""
        return self.embedding(*self.features(self.standardise(images)))

    def embedding(
        self, features: Sequence[Float[Tensor, "batch _ _"]], output: Float[Tensor, "batch outputs"] | None
    ) -> Embedding:
        """Return the inputs of the density and the head from the output of :meth:`features`."""
        by_layer = dict(zip(self.backbone.layers, features, strict=True))
        candidate = self.backbone.layers[: len(self.projection.positions)]
        pooled = candidate if self.density.reads == "pooled" else ()
        early = () if self.texture is None else self.backbone.layers[-1:]
        names = dict.fromkeys((*self.head_layers, *pooled, *early))  # Each once, whatever reads it.
        averaged = {name: average_positions(by_layer[name]) for name in names}
        z = self.projection([by_layer[name] for name in candidate])
        return Embedding(
            z,
            _joined([z, *(averaged[name] for name in self.head_layers)]),
            _joined([averaged[name] for name in pooled] or [z]),
            None if output is None else output.float(),
            averaged[early[0]] if early else None,
        )

    def score(self, embedding: Embedding) -> Scored:
        """Return the scores and the probabilities from the inputs of the density and the head.

        Raises:
            NetworkError: If the head reads the network's output and the backbone does not keep it.
        """
        log_density = self.density(embedding.density_input).log_density
        scores, probabilities = self.head.score(embedding.head_input, embedding.output)
        scores = {**scores, "log_density": log_density}
        if self.texture is not None and embedding.early is not None:
            scores[TEXTURE] = -self.texture(embedding.early).log_density
        return Scored(scores, probabilities)

    def forward(self, images: Images) -> Scored:
        """Return the probabilities and the scores of a batch; an image's do not depend on the batch."""
        return self.score(self.embed(images))

    def explain(self, embedding: Embedding, coordinates: Float[Tensor, "batch kept"]) -> dict[str, Tensor]:
        """Return distances to all classes, the nearest class, whitened deviations, and the head's explanation.

        Args:
            embedding: The inputs of the density and the head.
            coordinates: The coordinates of the images in the density.
        """
        explanation = dict(self.density.explain_at(coordinates)._asdict())
        return explanation | self.head.explain(embedding.head_input)


class Pipeline(nn.Module):
    """Computes packed outputs (:mod:`psc_core.tasks.outputs`) from pixels, so that one copy brings them to the host.

    Args:
        scorer: Everything that needs no calibration.
        calibration_scores: ``float32 (n,)`` ascending OOD scores of the calibration images.
        gates: The gates that make the OOD score; without gates it is −log density.
        layer_map: The map of one of the backbone's layers, for explanations.
        thumbnails: The kept training images, for explanations.
    """

    calibration_scores: Tensor

    def __init__(
        self,
        scorer: Scorer,
        calibration_scores: Float[Tensor, " n"],
        gates: Gates | None = None,
        layer_map: LayerMap | None = None,
        thumbnails: Thumbnails | None = None,
    ) -> None:
        super().__init__()
        self.scorer = scorer
        scores = calibration_scores.float().to(scorer.scale.device)
        self.register_buffer("calibration_scores", scores, persistent=False)
        self.gates = None if gates is None else gates.to(scores.device)
        self.map = None if layer_map is None else layer_map.to(scores.device)
        self.thumbnails = None if thumbnails is None else thumbnails.to(scores.device)
        self.eval()

    @property
    def gate_names(self) -> tuple[str, ...]:
        """The names of the gates; empty if there are none."""
        return () if self.gates is None else self.gates.names

    @property
    def is_traced(self) -> bool:
        """True if the network runs as a graph; see :attr:`psc_core.network.backbone.Backbone.is_traced`."""
        return self.scorer.backbone.is_traced

    def with_backbone(self, backbone: Backbone) -> Pipeline:
        """Return a pipeline with another backbone; it shares everything else."""
        return self.with_scorer(self.scorer.with_backbone(backbone, self.scorer.texture))

    def with_scorer(
        self,
        scorer: Scorer,
        *,
        scores: Float[Tensor, " n"] | None = None,
        gates: Gates | None = None,
        thumbnails: Thumbnails | None = None,
    ) -> Pipeline:
        """Return a pipeline with another scorer and the other given parts; it shares the rest."""
        scores = self.calibration_scores if scores is None else scores
        gates = self.gates if gates is None else gates
        return Pipeline(scorer, scores, gates, self.map, self.thumbnails if thumbnails is None else thumbnails)

    def forward(self, images: Images) -> Float[Tensor, "batch columns"]:
        """Return the packed outputs of a batch; an image's do not depend on the batch."""
        return self.outputs(self.scorer(images))

    def outputs(self, scored: Scored) -> Float[Tensor, "batch columns"]:
        """Pack the scores, the probabilities and the p-values of the gates."""
        ood_score, gate_p_values = ood_score_of(scored.scores, self.gates)
        p_value = conformal_p_values(self.calibration_scores, ood_score)
        scores = {**scored.scores, "ood_score": ood_score, "ood_p_value": p_value}
        return pack(self.scorer.head.score_names, scores, scored.probabilities, gate_p_values)

    def explain(
        self, images: Images, *, with_map: bool = False
    ) -> tuple[Float[Tensor, "batch columns"], dict[str, Tensor]]:
        """Return packed outputs and their explanation from one pass; see :meth:`Scorer.explain`.

        Args:
            images: A batch of images.
            with_map: Add :data:`MAP`, the grey levels of each position, ``uint8`` (B, rows, columns).

        Raises:
            UsageError: If ``with_map`` is set and the model has no map.
        """
        features, output = self._features(images)
        embedding = self.scorer.embedding(features, output)
        coordinates = self.scorer.density.coordinates(embedding.density_input)
        explanation = self.scorer.explain(embedding, coordinates)
        if self.thumbnails is not None:
            nearest: Nearest = self.thumbnails(coordinates)
            explanation |= nearest._asdict()
        if with_map:
            explanation[MAP] = self._map_of(features)
        return self.outputs(self.scorer.score(embedding)), explanation

    def forward_with_map(
        self, images: Images
    ) -> tuple[Float[Tensor, "batch columns"], UInt8[Tensor, "batch grid_rows grid_columns"]]:
        """Return packed outputs and the grey levels of each position from one pass.

        Raises:
            UsageError: If the model has no map.
        """
        features, output = self._features(images)
        return self.outputs(self.scorer.score(self.scorer.embedding(features, output))), self._map_of(features)

    def _features(self, images: Images) -> FeaturesAndOutput:
        return self.scorer.features(self.scorer.standardise(images))

    def _map_of(self, features: Sequence[Tensor]) -> UInt8[Tensor, "batch grid_rows grid_columns"]:
        if self.map is None:
            raise UsageError(NO_MAP)
        grey: Tensor = self.map(features[self.scorer.backbone.layers.index(self.map.layer)])
        return grey
