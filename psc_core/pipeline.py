"""The one path from pixels to outputs, shared by calibration, evaluation and serving; docs/architecture.md draws it.

Floating-point images are already the network's inputs and enter after ``standardise``.  The density reads either z or
averaged features; the head may read earlier layers besides z, averaged over positions.  A regression has a mean and
two standard deviations instead of p, and no check reads its uncertainty.

:class:`Scorer` does everything that needs no calibration; :class:`Pipeline` adds the OOD score and its p-value.  Shapes
are fixed and nothing waits for the host, so both can be compiled or captured in a CUDA graph.

:func:`pipeline_on` runs the network in other ways, with the same outputs up to rounding: ``folded`` as in fitting and
calibration, ``plain`` as it was trained, ``onnx`` in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from psc_core.checks import REVIEWED, TEXTURE, Checks, check_values
from psc_core.compute import autocast, together
from psc_core.conformal import conformal_p_values
from psc_core.density import Density
from psc_core.errors import NetworkError, UsageError
from psc_core.heads.base import Head, Scored
from psc_core.images.preprocess import Images, Inputs, Preprocess, standardise
from psc_core.learnt import AddedClass, Reviewed, log_odds, widen
from psc_core.maps import LayerMap
from psc_core.network.cut import Backbone, FeaturesAndOutput
from psc_core.network.export import to_onnx
from psc_core.network.onnx import INSTALLED
from psc_core.projection import Projection
from psc_core.settings import BACKENDS, Backend, Precision
from psc_core.stored_images import STORED_DISTANCE, StoredImages
from psc_core.tasks.base import Outputs, pack

if TYPE_CHECKING:
    from psc_core.model import FittedModel


REVIEWED_DISTANCE: Final = "reviewed_distance"  # the name of the distances to stored reviewed images, likewise
ADDED: Final = "added"  # the name of the log odds of the added classes, among the density's results
MAP: Final = "map"  # the name of the map in an explanation
NO_MAP: Final = "the model has no map; fit it again with checks, and a network whose early layers have rows and columns"


class Embedding(NamedTuple):
    """The inputs of the density and the head."""

    z: Float[Tensor, "batch dim"]  # projected features
    head_input: Float[Tensor, "batch _"]  # z, with the averaged features of the other layers that the head reads
    density_input: Float[Tensor, "batch _"]  # z itself, or averaged features of the chosen and other layers
    output: Float[Tensor, "batch outputs"] | None  # the network's own output, for the original network's predictions
    early: Float[Tensor, "batch _"] | None  # averaged features of the early layer, for the check "texture"


def average_positions(features: Float[Tensor, "batch channels _"]) -> Float[Tensor, "batch channels"]:
    # OpenVINO 2026.4 computes the difference that follows a mean wrongly unless the mean keeps its axis.
    return features.float().mean(2, keepdim=True).squeeze(2)


def _joined(parts: Sequence[Float[Tensor, "batch _"]]) -> Float[Tensor, "batch _"]:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def ood_score_of(
    scores: Mapping[str, Tensor], checks: Checks | None
) -> tuple[Float[Tensor, " batch"], list[Float[Tensor, "batch checks"]]]:
    """Return the OOD score of the checks, in nats, and their p-values; without checks −log density and no p-values."""
    if checks is None:
        return -scores["log_density"], []
    values = check_values(checks.names, scores)
    return checks.score(values), [checks.p_values(values)]


class Scorer(nn.Module):
    """Computes the scores of the task, the log density, and the probabilities if there are any, on one device."""

    scale: Tensor
    shift: Tensor

    def __init__(  # noqa: PLR0913
        self,
        preprocess: Preprocess,  # a scorer applies its device half
        # The truncated network as it runs, see :meth:`psc_core.network.cut.Backbone.fused`; where that predicts it
        # also returns the network's output.
        backbone: Backbone,
        projection: Projection,  # from features to z
        density: Density,  # log p of z, or of features averaged over positions
        head: Head,  # g′ on z, or where the original network predicts a head on its output
        texture: Density | None = None,  # of the averaged features of the backbone's last layer
        reviewed: Reviewed | None = None,  # of the density's coordinates
        head_layers: tuple[str, ...] = (),  # that the head reads besides z
        density_layers: tuple[str, ...] = (),  # that a density of averaged features reads besides the chosen
        added: tuple[AddedClass, ...] = (),  # the last classes of the density, which the head does not know
    ) -> None:
        super().__init__()
        for name, part in zip(("scale", "shift"), preprocess.scale_and_shift(), strict=True):
            self.register_buffer(name, part.to(projection.mean.device), persistent=False)
        self.preprocess, self.head_layers, self.density_layers = preprocess, head_layers, density_layers
        self.backbone, self.projection, self.density = backbone, projection, density
        self.head, self.texture, self.reviewed, self.added = head, texture, reviewed, added
        self.eval().requires_grad_(False)

    def replace(self, **parts: Any) -> Scorer:
        """Return a scorer with other parts, by the names of the constructor; it shares everything else."""
        modules = ("preprocess", "backbone", "projection", "density", "head", "texture", "reviewed")
        names = (*modules, "head_layers", "density_layers", "added")
        return Scorer(**{name: parts.get(name, getattr(self, name)) for name in names})

    @property
    def precision(self) -> Precision:
        """The precision of the backbone; everything after it is float32."""
        return self.backbone.precision

    def standardise(self, images: Images) -> Inputs:
        return standardise(images, self.scale, self.shift)

    def features(self, inputs: Inputs) -> FeaturesAndOutput:
        """Return the features of each layer, and the logits if the backbone keeps them."""
        with autocast(inputs.device, self.precision):
            result: FeaturesAndOutput = self.backbone(inputs)
        return result

    def embed(self, images: Images) -> Embedding:
        return self.embedding(*self.features(self.standardise(images)))

    def embedding(
        self, features: Sequence[Float[Tensor, "batch _ _"]], output: Float[Tensor, "batch outputs"] | None
    ) -> Embedding:
        """Return the inputs of the density and the head from the output of :meth:`features`."""
        by_layer = dict(zip(self.backbone.layers, features, strict=True))
        chosen = self.backbone.layers[: len(self.projection.positions)]
        pooled = (*chosen, *self.density_layers) if self.density.reads == "pooled" else ()
        early = () if self.texture is None else self.backbone.layers[-1:]
        names = dict.fromkeys((*self.head_layers, *pooled, *early))  # Each once, whatever reads it.
        averaged = {name: average_positions(by_layer[name]) for name in names}
        z = self.projection([by_layer[name] for name in chosen])
        return Embedding(
            z,
            _joined([z, *(averaged[name] for name in self.head_layers)]),
            _joined([averaged[name] for name in pooled] or [z]),
            None if output is None else output.float(),
            averaged[early[0]] if early else None,
        )

    def score(self, embedding: Embedding) -> Scored:
        """Return the scores and the probabilities from the inputs of the density and the head."""
        texture, early = self.texture, embedding.early
        density, (scores, probabilities), *unlike = together(
            lambda: self._density_scores(embedding.density_input),
            lambda: self.head.score(embedding.head_input, embedding.output),
            *([lambda: -texture(early).log_density] if texture is not None and early is not None else []),
        )
        odds = density.pop(ADDED, None)
        scored = Scored({**scores, **density, **({TEXTURE: unlike[0]} if unlike else {})}, probabilities)
        return scored if odds is None else widen(scored, odds)

    def _density_scores(self, density_input: Float[Tensor, "batch _"]) -> dict[str, Tensor]:
        w = self.density.coordinates(density_input)
        found = {"log_density": self.density.at(w).log_density}
        if self.reviewed is not None:
            found[REVIEWED] = self.reviewed.largest(w)
        if self.added:
            found[ADDED] = log_odds(w, self.density.get_buffer("centres"), self.added)
        return found

    def forward(self, images: Images) -> Scored:
        return self.score(self.embed(images))


class Pipeline(nn.Module):
    """Computes packed outputs (:mod:`psc_core.tasks.base`) from pixels, so that one copy brings them to the host."""

    calibration_scores: Tensor  # ``float32 (n,)`` ascending OOD scores of the calibration images

    def __init__(
        self,
        scorer: Scorer,
        calibration_scores: Float[Tensor, " n"],
        checks: Checks | None = None,
        layer_map: LayerMap | None = None,
        stored_images: StoredImages | None = None,
    ) -> None:
        super().__init__()
        self.scorer = scorer
        scores = calibration_scores.float().to(scorer.scale.device)
        self.register_buffer("calibration_scores", scores, persistent=False)
        self.checks = None if checks is None else checks.to(scores.device)
        self.map = None if layer_map is None else layer_map.to(scores.device)
        self.stored_images = None if stored_images is None else stored_images.to(scores.device)
        self.eval()

    @property
    def check_names(self) -> tuple[str, ...]:
        return () if self.checks is None else self.checks.names

    @property
    def is_traced(self) -> bool:
        return self.scorer.backbone.is_traced

    @property
    def has_hooks(self) -> bool:
        return self.scorer.backbone.has_hooks

    def with_backbone(self, backbone: Backbone) -> Pipeline:
        """Return a pipeline with another backbone; it shares everything else."""
        return self.with_scorer(self.scorer.replace(backbone=backbone))

    def with_scorer(
        self,
        scorer: Scorer,
        *,
        scores: Float[Tensor, " n"] | None = None,
        checks: Checks | None = None,
        stored_images: StoredImages | None = None,
    ) -> Pipeline:
        """Return a pipeline with another scorer and the other given parts; it shares the rest."""
        scores = self.calibration_scores if scores is None else scores
        checks = self.checks if checks is None else checks
        stored_images = self.stored_images if stored_images is None else stored_images
        return Pipeline(scorer, scores, checks, self.map, stored_images)

    def forward(self, images: Images) -> Float[Tensor, "batch columns"]:
        """Return the packed outputs of a batch; an image's do not depend on the batch."""
        return self.outputs(self.scorer(images))

    def outputs(self, scored: Scored) -> Float[Tensor, "batch columns"]:
        """Pack the scores, the probabilities and the p-values of the checks."""
        ood_score, check_p_values = ood_score_of(scored.scores, self.checks)
        p_value = conformal_p_values(self.calibration_scores, ood_score)
        scores = {**scored.scores, "ood_score": ood_score, "ood_p_value": p_value}
        return pack(self.scorer.head.score_names, scores, scored.probabilities, check_p_values)

    def explain(
        self, images: Images, *, with_map: bool = False
    ) -> tuple[Float[Tensor, "batch columns"], dict[str, Tensor]]:
        """Return packed outputs and the explanations of density, head and stored images, with :data:`MAP` on demand."""
        features, output = self._features(images)
        embedding = self.scorer.embedding(features, output)
        coordinates = self.scorer.density.coordinates(embedding.density_input)
        explanation = dict(self.scorer.density.explain_at(coordinates)._asdict())
        scored, parts = self.scorer.score(embedding), self.scorer.head.explain(embedding.head_input)
        if parts and (added := len(self.scorer.added)):
            parts["epistemic"] = parts["epistemic"] * scored.probabilities[:, :-added].sum(1)
            parts["aleatoric"] = scored.scores["predictive_entropy"] - parts["epistemic"]
        explanation |= parts
        if self.stored_images is not None:
            explanation[STORED_DISTANCE] = self.stored_images(coordinates)
        if (reviewed := self.scorer.reviewed) is not None:
            explanation[REVIEWED] = reviewed(coordinates)
            if reviewed.stored_images is not None:
                explanation[REVIEWED_DISTANCE] = reviewed.stored_images(coordinates)
        if with_map:
            explanation[MAP] = self._map_of(features)
        return self.outputs(scored), explanation

    def forward_with_map(
        self, images: Images
    ) -> tuple[Float[Tensor, "batch columns"], UInt8[Tensor, "batch grid_rows grid_columns"]]:
        """Return packed outputs and the grey levels of each position from one pass."""
        features, output = self._features(images)
        return self.outputs(self.scorer.score(self.scorer.embedding(features, output))), self._map_of(features)

    def _features(self, images: Images) -> FeaturesAndOutput:
        return self.scorer.features(self.scorer.standardise(images))

    def _map_of(self, features: Sequence[Tensor]) -> UInt8[Tensor, "batch grid_rows grid_columns"]:
        if self.map is None:
            raise UsageError(NO_MAP)
        grey: Tensor = self.map(features[self.scorer.backbone.layers.index(self.map.layer)])
        return grey


# Maximum difference between two backends: of probabilities, of means in standard deviations, and of log densities
# relative to their magnitude.
OUTPUT_TOLERANCE = 1e-4


def available_backends(model: FittedModel) -> tuple[Backend, ...]:
    """Return the backends on which a model can run, ``folded`` first; only a traced float32 network on a CPU has more.

    A network stored as an ONNX graph runs only in ONNX Runtime.
    """
    if model.backbone.onnx is not None:
        return ("onnx",)
    if model.device.type != "cpu" or not model.pipeline.is_traced or model.pipeline.scorer.precision != "fp32":
        return BACKENDS[:1]
    return BACKENDS if INSTALLED else BACKENDS[:2]


def pipeline_on(model: FittedModel, backend: Backend) -> Pipeline:
    """Return the pipeline of a model on one of its :func:`available_backends`."""
    if backend == "folded" or model.backbone.onnx is not None:
        return model.pipeline
    if backend == "plain":
        return model.pipeline.with_backbone(model.backbone)
    if not INSTALLED:
        raise NetworkError("the backend onnx needs ONNX Runtime; pip install 'psc[onnx]'")
    pipeline = model.pipeline.with_backbone(to_onnx(model.backbone, model.preprocess.shape))
    images = smooth_noise(model.preprocess)
    with torch.inference_mode():
        check_agreement(model, model.outputs(model.pipeline(images)), model.outputs(pipeline(images)))
    return pipeline


def check_agreement(model: FittedModel, calibrated: Outputs[Tensor], other: Outputs[Tensor]) -> None:
    """Compare the outputs of a model on two backends for the same images.

    A p-value may differ by one calibration image, because rounding may move a score past that image's.  A log density
    near zero is rounded like the others, because it is a difference of numbers as large as theirs.
    """
    size = calibrated["log_density"].abs()
    size = size.clamp(min=max(1.0, float(size.median())))
    predictions, apart = model.task.difference(calibrated, other)
    limits = {
        predictions: (apart, OUTPUT_TOLERANCE),
        "log densities": ((calibrated["log_density"] - other["log_density"]) / size, OUTPUT_TOLERANCE),
        "p-values": (calibrated["ood_p_value"] - other["ood_p_value"], 1.5 / (len(model.calibration) + 1)),
    }
    for name, (difference, limit) in limits.items():
        if not difference.abs().max() <= limit:
            raise NetworkError(
                f"the network gives other {name} on another backend, by up to {difference.abs().max():.3g}"
            )


def smooth_noise(preprocess: Preprocess, count: int = 32) -> Tensor:
    """Return ``uint8`` images of noise, from coarse to fine, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    images = []
    for index in range(count):
        cells = 1 + index * (min(preprocess.height, preprocess.width) - 1) // (count - 1)
        coarse = torch.randint(0, 256, (1, preprocess.channels, cells, cells), generator=generator).float()
        images.append(torch.nn.functional.interpolate(coarse, (preprocess.height, preprocess.width), mode="bilinear"))
    return torch.cat(images).round().to(torch.uint8)
