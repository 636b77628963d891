"""Fit density, head and gates to features, and join them in a scorer, which lacks only calibration.

The input is the network, its candidate layer(s), their projection to z, and the images of a fit; the output is
:class:`FittedParts`.  The steps, in order:

1. cut the network behind the candidate, the layers that the head reads besides z, and a few early layers;
2. read training images and selection split once each, and keep their features on disk (:mod:`.features`);
3. fit the density and the head to the training features; the selection split chooses their free numbers;
4. fit a density to each early layer, and choose one for the gate ``texture`` (:mod:`.early_layers`);
5. choose the early layer of the map (:mod:`.maps`);
6. cut the network again, behind the layers that are still read.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from psc_core.bundle.manifest import layers_of
from psc_core.collapse.report import Candidate
from psc_core.compute.passes import Compute
from psc_core.density import DENSITIES
from psc_core.density.base import Density
from psc_core.density.fit.density import fit_density
from psc_core.fitting.data import FitData
from psc_core.fitting.early_layers import TEXTURE_DENSITY, ChosenGates, choose_gates, early_layers
from psc_core.fitting.features import KeptFeatures, Layers, cut, read
from psc_core.fitting.job import FitJob
from psc_core.fitting.maps import ChosenMap, choose_map
from psc_core.images.preprocess import Pixels
from psc_core.model.pipeline import Scorer, ScorerParts
from psc_core.network.backbone import Backbone, trial_input
from psc_core.network.output import check_network_output, output_width
from psc_core.projection.fit.report import FittedProjection
from psc_core.tasks.fit.task import HeadJob
from psc_core.tasks.head import Head
from psc_core.thumbnails.fit.choose import kept_images, thumbnails_of
from psc_core.thumbnails.thumbnails import Thumbnails

BATCH: Final = 64
"""Number of images whose thumbnails are made at once."""


@dataclass(frozen=True)
class FittedParts:
    """Everything that a model consists of before it is calibrated."""

    backbone: Backbone  # as a bundle stores it; the scorer runs a fused copy
    scorer: Scorer  # uint8 pixels to scores
    chosen_gates: ChosenGates | None  # None: the density alone makes the OOD score
    map: ChosenMap | None  # None: no early layer has a grid
    thumbnails: Thumbnails | None  # None: the settings keep none
    feature_bytes: int  # on disk while these were fitted

    @property
    def gate_names(self) -> tuple[str, ...]:
        """Names of the gates; an empty tuple for a model without any."""
        return () if self.chosen_gates is None else self.chosen_gates.names


def fit_parts(
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    job: FitJob,
) -> FittedParts:
    """Take the steps above and return the parts.

    Args:
        net: The whole network.
        candidate: The layer(s) that z is made from.
        projection: The candidate's features to z.
        job: The images, settings and device.

    Raises:
        UsageError: If base predictions are asked for, and the network has another number of outputs than the task
            needs.
        FitError: If features cannot be fitted; the message says why.
        NetworkError: If the network cannot be cut.
    """
    data, settings, compute = job.data, job.settings, job.compute
    is_base = settings.predictions == "base"
    is_asked = is_base or (settings.predictions == "auto" and data.task_fit.compares_network_output)
    layers = _layers(net, candidate, job)
    backbone = cut(net, layers.names, data.train, compute, keep_output=is_asked)
    outputs = data.task.network_outputs(data.train.classes)
    trial = trial_input(data.train.preprocess).to(compute.device)
    if is_base:
        check_network_output(backbone, trial, outputs, name=data.train.name)
    of_selection = layers._replace(texture=(), output=is_asked and output_width(backbone, trial) == outputs)
    device_projection = projection.projection.to(compute.device)
    pooled = DENSITIES[settings.density].reads == "pooled"
    with tempfile.TemporaryDirectory(prefix="psc-fit-") as scratch:
        folders = [Path(tempfile.mkdtemp(dir=scratch)) for _ in range(2)]
        train = read(backbone, layers, device_projection, data.train, compute, folders[0], pooled=pooled)
        selection = read(backbone, of_selection, device_projection, data.selection, compute, folders[1], pooled=pooled)
        fitted = _fit_to_features(train, selection, job)
    parts = ScorerParts(
        data.train.preprocess,
        backbone.fused(compute.precision),
        device_projection,
        fitted.density,
        fitted.head,
        head_layers=layers.head,
    )
    scorer = Scorer(parts)
    gates = choose_gates(scorer, layers, fitted.textures, data, compute) if settings.ood_score == "gates" else None
    chosen_map = _choose_map(scorer, layers, train, data, compute)
    layer, texture = (None, None) if gates is None or gates.texture is None else gates.texture
    kept = layers_of(layers.candidate, layers.head, layer, None if chosen_map is None else chosen_map.map.layer)
    keep_output = is_base or fitted.head.reads_output
    if tuple(kept) != layers.names or keep_output != backbone.keep_output:
        backbone = cut(net, kept, data.train, compute, keep_output=keep_output)
    scorer = scorer.with_backbone(backbone.fused(compute.precision), texture)
    feature_bytes = train.file_bytes + selection.file_bytes
    return FittedParts(backbone, scorer, gates, chosen_map, fitted.thumbnails, feature_bytes)


class _FromFeatures(NamedTuple):
    """The parts that are fitted to the features on disk, on the device."""

    density: Density
    head: Head
    textures: dict[str, Density]  # by early layer
    thumbnails: Thumbnails | None


def _fit_to_features(train: KeptFeatures, selection: KeptFeatures, job: FitJob) -> _FromFeatures:
    """Fit density, head and early layers' densities to the training features; the selection split chooses."""
    data, settings, device = job.data, job.settings, job.compute.device
    classes = data.train.classes
    density = fit_density(
        train.examples(train.density_input, classes),
        kind=settings.density,
        pca=settings.pca,
        held_out=selection.examples(selection.density_input, classes),
    ).to(device)
    kind = settings.head_of(data.task.heads)
    head_job = HeadJob(kind, train.features, selection.features, classes, settings.predictions, settings.seed, device)
    head = data.task_fit.fit_head(head_job)
    textures = {
        layer: fit_density(train.examples(early, classes), kind=TEXTURE_DENSITY).to(device)
        for layer, early in train.texture.items()
    }
    keep = settings.keep_examples
    return _FromFeatures(density, head, textures, None if keep is None else _thumbnails(keep, train, density, data))


def _layers(net: nn.Module, candidate: Candidate, job: FitJob) -> Layers:
    """Return the layers to read: the early ones where gates or the head read them."""
    data, settings, device = job.data, job.settings, job.compute.device
    reads_layers = data.task.heads[settings.head_of(data.task.heads)].reads_layers
    early: tuple[str, ...] = ()
    with_gates = settings.ood_score == "gates"
    if with_gates or reads_layers:
        trial = trial_input(data.train.preprocess).to(device)
        early = tuple(early_layers(net.to(device), candidate.layers, trial))
    beside_z = candidate.layers if data.task_fit.averages_candidate(settings) else ()
    return Layers(candidate.layers, early if reads_layers else beside_z, early if with_gates else ())


def _choose_map(
    scorer: Scorer, layers: Layers, train: KeptFeatures, data: FitData, compute: Compute
) -> ChosenMap | None:
    def features_of(images: Pixels) -> dict[str, Tensor]:
        features, _ = scorer.features(scorer.standardise(images))
        return dict(zip(layers.names, features, strict=True))

    return choose_map(features_of, train.moments, data.selection, compute, data.seed)


def _thumbnails(count: int, read: KeptFeatures, density: Density, data: FitData) -> Thumbnails:
    """Return thumbnails of training images with their coordinates, from the features that were read."""
    kept = kept_images(data.train, count, data.seed)
    images, rows = read.features.images, torch.empty(len(data.train), dtype=torch.int64)
    rows[images] = torch.arange(len(images))  # Several labels of an image have the same features.
    features = read.density_input[rows[kept]].to(density.basis.device)
    few = data.train.subset(kept)
    tensors = {
        "embedding": density.coordinates(features).float(),
        "pixels": torch.cat([thumbnails_of(few.preprocess.to_pixels(batch.images)) for batch in few.batches(BATCH)]),
        "images": kept,
        "labels": few.first_labels(),
        "values": few.values,
    }
    return Thumbnails({name: tensor for name, tensor in tensors.items() if tensor is not None})
