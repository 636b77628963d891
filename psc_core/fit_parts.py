"""Fit density, head and checks to features, and join them in a scorer, which lacks only calibration.

:func:`fit_parts`, the last stage of a fit, takes these steps.

1. Cut the network behind the chosen layer, the layers that the head reads besides z, and a few early layers.
2. Read training images and selection split once each, and keep their features on disk, one row for each labelled
   example, ordered by class because a density reads one class at a time (:func:`read`).  Memory does not grow with n.
3. Fit density and head to the training features; the selection split chooses their free numbers.
4. Choose the checks and the early layer of ``texture`` (:func:`choose_checks`). ``content`` is always a check,
   ``texture`` wherever there is an earlier layer whose averages vary, and ``confidence`` unless some image has labels
   of several classes: then low confidence is no reason to call an image out of distribution. (Choosing the checks by
   synthetic OOD images as well was tried, and dropped checks that real images need: synthetic images far from the data
   have unusual textures.)
5. Choose the layer of the map and its density (:func:`.choose_map`): deep layers detect objects better, early ones
   surfaces, and a map is as fine as its layer.
6. Cut the network again, behind the layers that are still read.

:func:`compare_positions` belongs to the projection: NC1 and NC4 only ask for what tells the known classes apart, for
which one spatial component a channel is often enough; a density needs more, so it is fitted with more and more of them.

Early layers, map and components are chosen by AUROC: images of the selection split as they are against images made
from them (:mod:`psc_core.checks`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from psc_core.bundle import layers_of
from psc_core.checks import (
    CONFIDENCE,
    CONTENT,
    REAL,
    TEXTURE,
    CheckChoice,
    by_transform,
    check_values,
    compare,
    option_name,
    synthetic_batches,
    vary,
)
from psc_core.collapse import ChosenLayer
from psc_core.compute import Compute, autocast, begin, count_images, passes
from psc_core.data.dataset import ImageDataset, draw, stable_order
from psc_core.density import DENSITIES, ConstantFeatures, Density, Examples, fit_density
from psc_core.errors import NetworkError, warn
from psc_core.features import FeatureMatrix, as_matrix, chunk_rows, side_by_side, usable
from psc_core.fit_data import FitData, FitJob
from psc_core.heads.base import Features, Head, Scored
from psc_core.images.preprocess import Pixels, Preprocess
from psc_core.maps import MAX_CHANNELS, LayerMap, PositionMoments, choose_map, grid_of
from psc_core.metrics import auroc
from psc_core.network.cut import Backbone, FeatureStep, feature_step, trial_input, truncate
from psc_core.network.layers import LayerInfo, list_layers
from psc_core.network.output import check_network_output, output_width
from psc_core.pipeline import Embedding, Scorer, average_positions
from psc_core.projection import FittedProjection, Projection, ProjectionReport
from psc_core.stored_images import StoredImages, choose_images, shrink

Z: Final = ".z"  # beside names of layers, none of which begins with a dot
OUTPUT: Final = ".output"  # of the network, as trained


class Layers(NamedTuple):
    """The parts of a network that the last stage reads; a layer may serve several."""

    chosen: tuple[str, ...]  # projected to z
    head: tuple[str, ...]  # read by the head besides z
    density: tuple[str, ...]  # read by a density that reads layers, besides the chosen
    texture: tuple[str, ...]  # early layers, one of which the check "texture" will read
    output: bool = False  # whether the network's own output is read too

    @property
    def names(self) -> tuple[str, ...]:
        """Each layer once, in the order in which the network is cut behind them."""
        return tuple(dict.fromkeys((*self.chosen, *self.head, *self.density, *self.texture)))

    def of(self, features: Sequence[Tensor], layers: Iterable[str]) -> list[Tensor]:
        """Return the features of some ``layers``, picked from those of all :attr:`names`."""
        return [features[self.names.index(layer)] for layer in layers]


def cut(net: nn.Module, layers: Sequence[str], data: ImageDataset, compute: Compute, *, keep_output: bool) -> Backbone:
    """Return ``net`` cut behind ``layers``, on the device, after a trial on one input."""
    trial = trial_input(data.preprocess).to(compute.device)
    return truncate(net.to(compute.device), layers, keep_output=keep_output, trial=trial)


def read(
    backbone: Backbone,
    layers: Layers,
    projection: Projection,
    dataset: ImageDataset,
    job: FitJob,
) -> tuple[Features, Mapping[str, PositionMoments]]:
    """Run the network over a data set and keep the features of every labelled example in scratch files.

    The moments are those of early layers with a grid, over the images of this process.
    """
    compute, pooled = job.compute, DENSITIES[job.settings.density].reads == "pooled"
    running = backbone.fused(compute.precision)
    head, density = [Z, *layers.head], [*layers.chosen, *layers.density] if pooled else []
    averaged = dict.fromkeys([*layers.head, *density, *layers.texture])  # Each layer once, whatever reads it.

    def columns_of(found: Sequence[Tensor], output: Tensor | None) -> dict[str, Tensor]:
        columns = {Z: projection(layers.of(found, layers.chosen))}
        columns |= {layer: average_positions(*layers.of(found, [layer])) for layer in averaged}
        return columns if output is None or not layers.output else columns | {OUTPUT: output.float()}

    def step(images: Tensor) -> dict[str, Tensor]:
        found, output = running(images)
        for layer, sums in moments.items():
            sums.add(*layers.of(found, [layer]))
        return columns_of(found, output)

    with torch.inference_mode():
        of_one, output = backbone(trial_input(dataset.preprocess).to(compute.device))
        widths = {name: columns.shape[1] for name, columns in columns_of(of_one, output).items()}
    moments = _moments_of(layers, of_one, dataset.preprocess)
    order = stable_order(dataset.labels)
    files = store(step, widths, dataset, order, job)

    def matrix(names: Sequence[str], beside: Sequence[str]) -> FeatureMatrix:
        # The rows of a block decide how sums round: as if all of ``beside`` were read, which earlier fits did.
        return side_by_side([as_matrix(files[name]) for name in names], widest=sum(widths[name] for name in beside))

    images = torch.arange(len(dataset)).repeat_interleave(dataset.offsets.diff())[order]
    values, of_head = dataset.subset(images).values, tuple(widths[name] for name in head)
    labels, read_together = dataset.labels[order], head + density
    own = as_matrix(files[OUTPUT]) if OUTPUT in files else None
    of_density, texture = density or [Z], {layer: matrix([layer], layers.texture) for layer in layers.texture}
    inputs = (matrix(head, read_together), matrix(of_density, read_together), texture)
    return Features(*inputs, labels, images, dataset.classes, of_head, values, own), moments


def _moments_of(layers: Layers, of_one: Sequence[Tensor], preprocess: Preprocess) -> dict[str, PositionMoments]:
    """Return empty sums for each early layer that a map can be made from; ``of_one`` are one image's features."""
    found = {}
    for layer, features in zip(layers.texture, layers.of(of_one, layers.texture), strict=True):
        grid = grid_of(features.shape[2], preprocess.height, preprocess.width)
        if grid is not None and features.shape[1] <= MAX_CHANNELS:
            found[layer] = PositionMoments(features.shape[1], grid, features.device)
    return found


def store(
    step: Callable[[Tensor], Mapping[str, Tensor]],
    widths: Mapping[str, int],
    dataset: ImageDataset,
    order: Int[Tensor, " examples"],
    job: FitJob,
) -> dict[str, Float[np.ndarray, "examples width"]]:
    """Run ``step`` over the images and write its results by name, (B, width), to one file each.

    A file has one row for each labelled example, in ``order``: row i is that of example ``order[i]``.
    """
    compute = job.compute
    files = {name: job.scratch.array((dataset.examples, width), np.float32) for name, width in widths.items()}
    where = torch.empty_like(order)
    where[order] = torch.arange(len(where))
    if compute.world > 1:
        where = where[compute.shard_examples(dataset)]
    at = 0
    for columns, batch in passes(compute.shard(dataset), compute, "features", step):
        for name, file in files.items():
            values = batch.per_example(columns[name]).cpu()
            file[where[at : at + len(values)].numpy()] = values.float().numpy()
        at += len(batch.labels)
    if compute.world > 1:
        for file in files.values():
            for chunk in chunk_rows(*file.shape):
                file[chunk] = compute.sum_(torch.from_numpy(file[chunk]))
    return files


DEPTHS: Final = (1 / 3, 1 / 2, 2 / 3)  # the fractions of the way to the chosen layer at which early layers are compared
TEXTURE_DENSITY: Final = "gda"  # not of unit length: the length of features tells textures apart


def choose_checks(
    scorer: Scorer, layers: Layers, textures: Mapping[str, Density], data: FitData, compute: Compute
) -> tuple[tuple[str, ...], str | None, CheckChoice, dict[str, Scored]]:
    """Return the checks by the rule, the early layer that tells synthetic OOD images apart best, and the comparison.

    The layer is None where none lies before the chosen one.  The last are the synthetic images as the finished scorer
    scores them, by transform.
    """
    reads_confidence, reason = data.task_type.confidence_check(ambiguous=data.is_ambiguous)
    names: tuple[str, ...] = (CONTENT, CONFIDENCE) if reads_confidence else (CONTENT,)
    values, scored = synthetic_values(scorer, layers, textures, names, data, compute)
    confidence = values[REAL].get(CONFIDENCE)
    if confidence is not None and not vary(confidence):
        names = (CONTENT,)
    choice = compare(values, names, tuple(textures), reason=reason)
    if not textures:
        return names, None, choice, scored
    layer = {option_name(layer, names): layer for layer in textures}[choice.chosen]
    for name, of_transform in scored.items():
        scored[name] = Scored({**of_transform.scores, TEXTURE: values[name][layer]}, of_transform.probabilities)
    return (TEXTURE, *names), layer, choice, scored


def early_layers(net: nn.Module, layers: Sequence[str], trial: Tensor) -> list[str]:
    """Return a few layers before the first of ``layers``, at :data:`DEPTHS` of the way to it.

    They are blocks, or operations of a network that has no blocks before it.
    """
    order = {layer.name: layer.index for layer in list_layers(net, trial, granularity="all")}
    end = min(order.get(name, len(order)) for name in layers)
    for granularity in ("blocks", "operations"):
        try:
            listed: list[LayerInfo] = list_layers(net, trial, granularity=granularity)
        except NetworkError:  # The network has no blocks there.
            continue
        before = [layer.name for layer in listed if order.get(layer.name, end) < end]
        if before:
            return list(dict.fromkeys(before[max(0, round(depth * len(before)) - 1)] for depth in DEPTHS))
    return []


def synthetic_values(
    scorer: Scorer,
    layers: Layers,
    textures: Mapping[str, Density],
    names: Sequence[str],
    data: FitData,
    compute: Compute,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Scored]]:
    """Return values by transform, those of real images under :data:`.REAL`, then by check or early layer; and scores.

    The scores are those of the images of each transform.
    """

    def read(images: Pixels) -> dict[tuple[str, str], Tensor]:
        count_images(len(images))
        features, output = scorer.features(scorer.standardise(images))
        scores, probabilities = scorer.score(scorer.embedding(features, output))
        found = {("value", name): each for name, each in zip(names, check_values(names, scores).unbind(1), strict=True)}
        for (layer, density), early in zip(textures.items(), layers.of(features, textures), strict=True):
            found["value", layer] = -density(average_positions(early)).log_density
        return found | {("score", name): each for name, each in scores.items()} | {("", "probabilities"): probabilities}

    mixed = not data.is_ambiguous
    batches = synthetic_batches(data.selection, compute, "synthetic OOD images", mixed=mixed, seed=data.seed)
    values, scored = {}, {}
    for transform, found in by_transform(batches, read).items():
        of_kind = {of: {name: each for (kind, name), each in found.items() if kind == of} for of in ("value", "score")}
        values[transform] = of_kind["value"]
        if transform != REAL:
            scored[transform] = Scored(of_kind["score"], found["", "probabilities"])
    return values, scored


BATCH: Final = 64  # number of images that are made smaller at once


@dataclass(frozen=True)
class FittedParts:
    """Everything that a model consists of before it is calibrated."""

    backbone: Backbone  # as a bundle stores it; the scorer runs a fused copy
    scorer: Scorer  # uint8 pixels to scores
    checks: tuple[str, ...]  # names; none where the density alone makes the OOD score
    map: LayerMap | None  # None: no early layer has a grid
    stored_images: StoredImages | None  # None: the settings keep none
    record: Mapping[str, Any]  # the comparisons that chose checks and map, JSON types
    training: Features  # of the training images
    texture: str | None  # the early layer that the scorer reads
    synthetic: Mapping[str, Scored] | None  # synthetic OOD images by transform; None: none were made

    def of_training(self, positions: Int[Tensor, " images"]) -> Scored:
        """Return what the scorer gives for training images, from their features."""
        rows, read = _rows_of(self.training, positions), self.training
        device = self.scorer.scale.device
        parts = []
        for at in torch.split(rows, BATCH):
            head_input, density_input = read.head_input[at].to(device), read.density_input[at].to(device)
            output = None if read.network_output is None else read.network_output[at].to(device)
            early = None if self.texture is None else read.texture[self.texture][at].to(device)
            z = head_input[:, : read.widths[0]]
            parts.append(self.scorer.score(Embedding(z, head_input, density_input, output, early)))
        return Scored.joined(parts)


def _rows_of(read: Features, positions: Int[Tensor, " images"]) -> Int[Tensor, " images"]:
    """Return a row of each of these images; several labels of an image have the same features."""
    rows = torch.empty(int(read.images.max()) + 1, dtype=torch.int64)
    rows[read.images] = torch.arange(len(read.images))
    return rows[positions]


def fit_parts(net: nn.Module, chosen: ChosenLayer, projection: FittedProjection, job: FitJob) -> FittedParts:
    """Take the steps above and return the parts."""
    begin("features")
    data, settings, compute = job.data, job.settings, job.compute
    is_base = settings.predictions == "original"
    is_asked = is_base or (settings.predictions == "auto" and data.task_type.compares_network_output)
    layers = _layers(net, chosen, job)
    backbone = cut(net, layers.names, data.train, compute, keep_output=is_asked)
    outputs = data.task.network_outputs(data.train.classes)
    trial = trial_input(data.train.preprocess).to(compute.device)
    if is_base:
        check_network_output(backbone, trial, outputs, name=data.train.name)
    layers = layers._replace(output=is_asked and output_width(backbone, trial) == outputs)
    device_projection = projection.projection.to(compute.device)
    train, moments = read(backbone, layers, device_projection, data.train, job)
    selection, _ = read(backbone, layers._replace(texture=()), device_projection, data.selection, job)
    density, head, textures = _fit_to_features(train, selection, job)
    if density.reads == "pooled":
        with torch.inference_mode():
            read_by = layers.of(backbone(trial)[0], names := (*layers.chosen, *layers.density))
        widths = {name: part.shape[1] for name, part in zip(names, read_by, strict=True)}
        warn_of_unread(density, widths, beside=layers.density)
    running = backbone.fused(compute.precision)
    scorer = Scorer(
        data.train.preprocess,
        running,
        device_projection,
        density,
        head,
        head_layers=layers.head,
        density_layers=layers.density,
    )
    begin("checks")
    checks: tuple[str, ...] = ()
    layer, layer_map, record, synthetic = None, None, {}, None
    if settings.ood_score == "checks":
        checks, layer, choice, synthetic = choose_checks(scorer, layers, textures, data, compute)
        record["checks"] = choice.to_json()
        job.say(f"checks: {', '.join(checks)}", choice.table())
    if chosen_map := _choose_map(scorer, layers, moments, data, compute):
        layer_map, record["map"] = chosen_map
    beside_z = layers.head + layers.density
    kept = layers_of(layers.chosen, beside_z, layer, None if layer_map is None else layer_map.layer)
    keep_output = is_base or head.reads_output
    if tuple(kept) != layers.names or keep_output != backbone.keep_output:
        backbone = cut(net, kept, data.train, compute, keep_output=keep_output)
    texture = None if layer is None else textures[layer]
    scorer = scorer.replace(backbone=backbone.fused(compute.precision), texture=texture)
    count = settings.stored_images
    stored_images = None if count is None else _stored_images(count, train, density, data)
    return FittedParts(backbone, scorer, checks, layer_map, stored_images, record, train, layer, synthetic)


def _fit_to_features(train: Features, selection: Features, job: FitJob) -> tuple[Density, Head, dict[str, Density]]:
    """Fit density, head and each early layer's density to the training features; the selection split chooses."""
    settings, device = job.settings, job.compute.device
    density = fit_density(
        _examples(train, train.density_input),
        kind=settings.density,
        pca=settings.pca,
        held_out=_examples(selection, selection.density_input),
    ).to(device)
    named = train._replace(images=job.data.train.positions_given(train.images))  # A head may keep which they are.
    head = job.data.task_type.fit_head(named, selection, settings, device)
    textures = {}
    for layer, early in train.texture.items():
        try:
            textures[layer] = fit_density(_examples(train, early), kind=TEXTURE_DENSITY).to(device)
        except ConstantFeatures:  # such as averages over positions behind instance normalisation
            job.say(f"checks: {TEXTURE} does not read layer {layer}, whose averages are equal for all images")
    return density, head, textures


SHARE: Final = 0.1  # of one component, below which a density reads next to nothing of a layer


def warn_of_unread(density: Density, widths: Mapping[str, int], *, beside: Sequence[str] = ()) -> None:
    """Warn of layers, named with their ``widths``, that have no share in the components of a density of all.

    Those ``beside`` the chosen ones are read as well because they have collapsed.
    """
    shares = torch.linalg.qr(density.get_buffer("basis")).Q.square().sum(1).split([*widths.values()])
    for name, share in zip(widths, shares, strict=True):
        if float(share.sum()) < SHARE:
            others = ", ".join(each for each in widths if each != name)
            remedy = (
                f"--layer {name} reads it alone"
                if name in beside
                else "--density gda++ reads z, which holds the chosen layers alone, in one scale"
            )
            warn(
                f"the density reads next to nothing of layer {name}, whose features hardly vary beside those of "
                f"{others}; {remedy}"
            )


def _examples(of: Features, matrix: FeatureMatrix) -> Examples:
    return Examples(matrix, of.labels, len(of.classes), of.images, of.classes)


def _layers(net: nn.Module, chosen: ChosenLayer, job: FitJob) -> Layers:
    """Return the layers to read: the early ones where checks or the head read them."""
    data, settings, device = job.data, job.settings, job.compute.device
    reads_layers = data.task.heads[settings.head_of(data.task.heads)].reads_layers
    early: tuple[str, ...] = ()
    with_checks = settings.ood_score == "checks"
    if with_checks or reads_layers:
        trial = trial_input(data.train.preprocess).to(device)
        early = tuple(early_layers(net.to(device), chosen.layers, trial))
    of_head = chosen.layers if data.task_type.averages_layer(settings) else ()
    of_density: tuple[str, ...] = ()
    if DENSITIES[settings.density].reads == "pooled" and chosen.collapsed_penultimate is not None:
        of_density = (chosen.collapsed_penultimate,)
        job.say(f"density: reads {of_density[0]} too, the penultimate layer, which has collapsed")
    return Layers(chosen.layers, early if reads_layers else of_head, of_density, early if with_checks else ())


def _choose_map(
    scorer: Scorer, layers: Layers, moments: Mapping[str, PositionMoments], data: FitData, compute: Compute
) -> tuple[LayerMap, dict[str, Any]] | None:
    def features_of(images: Pixels) -> dict[str, Tensor]:
        count_images(len(images))
        features, _ = scorer.features(scorer.standardise(images))
        return dict(zip(layers.names, features, strict=True))

    return choose_map(features_of, moments, data.train, data.selection, compute, data.seed)


def _stored_images(count: int, read: Features, density: Density, data: FitData) -> StoredImages:
    """Return stored training images with their coordinates, from the features that were read."""
    kept = choose_images(data.train, count, data.seed)
    features = read.density_input[_rows_of(read, kept)].to(density.basis.device)
    few = data.train.subset(kept)
    tensors = {
        "embedding": density.coordinates(features).float(),
        "pixels": torch.cat([shrink(few.preprocess.to_pixels(batch.images)) for batch in few.batches(BATCH)]),
        "images": data.train.positions_given(kept),
        "labels": few.first_labels(),
        "values": few.values,
    }
    return StoredImages({name: tensor for name, tensor in tensors.items() if tensor is not None})


def report_of(
    chosen: ChosenLayer,
    projection: FittedProjection,
    parts: FittedParts,
    metrics: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the record of a fit, JSON types; ``metrics`` were measured on the calibration split."""
    report = {
        "collapse": chosen.report and {**chosen.report.to_json(), "notes": list(chosen.notes)},
        "metrics": {**metrics, "projection": projection_metrics(projection.report), **parts.record},
        "provenance": dict(provenance),
    }
    recorded: dict[str, Any] = round_floats(report)
    return recorded


def projection_metrics(report: ProjectionReport) -> dict[str, Any]:
    """Return the record of a projection, JSON types."""
    nc1, nc4 = report.of_size()
    return {
        "nc1": nc1,
        "nc4": nc4,
        "scaled_nc1": report.scaled_nc1,
        "scaled_nc4": report.scaled_nc4,
        "warning": report.warning,
        "pooled": report.note,
        "positions": [{"d_proj": d, "synthetic_auroc": value} for d, value in report.positions],
    }


def round_floats(value: Any) -> Any:
    """Return ``value`` with floats to 9 digits, which the version hashes; the others depend on how sums are split."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: round_floats(each) for key, each in value.items()}
    return [round_floats(each) for each in value] if isinstance(value, (list, tuple)) else value


AUROC_LOSS: Final = 0.005  # mean AUROC that may be given up for fewer components
TRAINING_IMAGES: Final = 10_000  # maximum number of training images that the densities are fitted on


def compare_positions(
    backbone: Backbone, largest: Projection, sizes: Sequence[tuple[int, int]], job: FitJob
) -> dict[int, float]:
    """Return the mean AUROC of synthetic against real images for each number of spatial components."""
    data, compute = job.data, job.compute
    step = feature_step(backbone, compute.precision)
    few = draw(data.train, TRAINING_IMAGES, data.seed)
    kept, of_batches = [], []
    for features, batch in passes(few, compute, "positions: features", step):
        kept.append(batch.per_example(largest(features)).cpu())
        of_batches.append(batch.labels)
    made = _synthetic_features(largest, step, data, compute)
    z, labels, classes = usable(torch.cat(kept), torch.cat(of_batches))
    found = {}
    for c_proj, d_proj in sizes:
        columns = _columns(largest, c_proj, d_proj)
        fitted = fit_density(Examples(z[:, columns], labels, classes), kind=job.settings.density)
        scores = {name: -fitted(values[:, columns]).log_density for name, values in made.items()}
        real = scores.pop(REAL)
        found[d_proj] = statistics.mean(auroc(real, synthetic) for synthetic in scores.values())
    return found


def fewest_positions(found: Mapping[int, float]) -> int:
    """Return the smallest number of spatial components within :data:`AUROC_LOSS` of the best."""
    return min(d for d, value in found.items() if value >= max(found.values()) - AUROC_LOSS)


def _synthetic_features(
    largest: Projection, step: FeatureStep, data: FitData, compute: Compute
) -> dict[str, Float[Tensor, "n dim"]]:
    """Return z of the selection split's images under :data:`.REAL`, and of the images made from them by transform."""
    mixed, selection = not data.is_ambiguous, data.selection

    def project(images: Pixels) -> dict[str, Tensor]:
        count_images(len(images))
        with autocast(compute.device, compute.precision):
            features = step(selection.preprocess.standardise(images))
        return {"z": largest(features)}

    batches = synthetic_batches(selection, compute, "positions: synthetic OOD images", mixed=mixed, seed=data.seed)
    return {name: found["z"] for name, found in by_transform(batches, project).items()}


def _columns(largest: Projection, c_proj: int, d_proj: int) -> Tensor:
    """Return the columns of z that hold the leading components, ``int64 (c_proj · d_proj,)``."""
    grid = torch.arange(largest.c_proj * largest.d_proj).view(largest.c_proj, largest.d_proj)
    return grid[:c_proj, :d_proj].flatten()
