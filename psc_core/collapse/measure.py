"""Measure neural collapse after every layer: NC1 on training data, NC4 on validation data.

For each layer, with the sums of :mod:`psc_core.numerics.scatter`,

    NC1 = Tr(Σ_W) / Tr(Σ_T)      within-class fraction of the variability, over the labelled training examples
    NC4 = fraction of the labelled validation examples whose nearest class mean (Euclidean) is that of their label
    NC4's error = √(Σ_i d_i²) / examples      standard error of its difference to the best layer's NC4

with d_i the difference in the number of labels of validation image i that the two layers meet: where each image has one
label, McNemar's √(b + c) / n of the b + c images that one layer has right and the other wrong.  (Paper, section 4.1 and
appendix "Measuring collapse": after each layer.)  This takes one pass over the training images, class by class, and one
over the validation images.  For a regression the classes are bins of the target, and R² takes the place of NC4
(:mod:`psc_core.collapse.linear`), with one more pass over the training images.

Class means take classes × width × 8 bytes per layer.  Layers are measured in groups that fit the memory budget, two
passes per group; a layer that does not fit alone is measured in column ranges, over which scatter and distances add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from psc_core.collapse.linear import squared_errors
from psc_core.collapse.report import NC4, R2, CollapseReport, LayerCollapse, best_layer
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset, stable_order
from psc_core.errors import FitError
from psc_core.network.backbone import Backbone, FeatureStep, example_input, feature_step, truncate
from psc_core.network.layers import LayerInfo, list_layers, select_layers
from psc_core.numerics.scatter import (
    MIN_COLUMNS,
    Centroids,
    ClassScatter,
    between_scatter,
    class_pairs,
    nc1_from_scatter,
)
from psc_core.rates import check_fraction
from psc_core.settings import FitSettings


@dataclass(frozen=True)
class _ColumnRange:
    """Columns ``start … stop`` of a layer's features."""

    layer: LayerInfo
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == math.prod(self.layer.shape)


@dataclass
class _LayerSums:
    """Sums for one layer so far, see :func:`psc_core.numerics.scatter.between_scatter`."""

    within: float = 0.0
    between: float = 0.0
    magnitude: float = 0.0
    correct: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))  # bits, one an example


def measure_layers(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    settings: FitSettings,
    compute: Compute,
) -> CollapseReport:
    """Measure NC1 and NC4 after the layers of ``net``.

    Args:
        net: A classifier.  It is moved to the device and put in evaluation mode.
        train: All images that NC1 is measured on, some of every class; each process reads its own shard.
        val: All images that NC4 is measured on, of the same classes, likewise.
        settings: The penultimate layer is measured whatever the pattern, and ``seed`` is of the split that ``val`` is
            one half of.
        compute: The device must support float64; the network runs in float32 whatever the precision, so that the
            choice of the layer does not depend on it.

    Raises:
        FitError: Non-finite features.
        UsageError: ε outside (0, 1), or a pattern that matches no layer.
        NetworkError: The network cannot be run or cut.
    """
    epsilon, layers = settings.epsilon, settings.layers
    check_fraction(epsilon, "epsilon")
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    compute = replace(compute, precision="fp32")
    example = example_input(train.preprocess).to(compute.device)
    every = list_layers(net.to(compute.device), example, granularity=settings.granularity)
    names = {layer.name for layer in select_layers(every, layers)}
    wanted = [layer for layer in every if layer.name in names or layer.role == "penultimate"]
    measurement = _Measurement(train, val, counts.double().to(compute.device), compute)
    groups = column_groups(wanted, len(counts), compute.batch_size, compute.max_memory)
    by_nearest_mean = val.values is None  # of its class; numbers are told by a linear fit
    for number, group in enumerate(groups, 1):
        cut_after = list(dict.fromkeys(part.layer.name for part in group))
        backbone = truncate(net, cut_after, keep_output=False, example=example)
        label = f"collapse {number}/{len(groups)}"
        means = measurement.add_scatter(backbone, group, label)
        if by_nearest_mean:
            measurement.add_correct(backbone, group, means, label)
    if by_nearest_mean:
        measure, nc4_of, error_of = NC4, measurement.nc4, measurement.error
    else:
        errors = squared_errors(net, wanted, train, val, compute, example)
        measure, nc4_of, error_of = R2, errors.r_squared, errors.error
    measured = []
    for layer in wanted:
        sums = measurement.sums[layer.name]
        nc1 = nc1_from_scatter(sums.within, sums.between, sums.magnitude)
        measured.append(LayerCollapse(**vars(layer), nc1=nc1, nc4=nc4_of(layer.name)))
    best = best_layer(measured, epsilon, layers)
    if best is not None:
        measured = [replace(layer, nc4_error=error_of(layer.name, best.name)) for layer in measured]
    counted = train.examples, val.examples
    return CollapseReport(tuple(measured), epsilon, settings.granularity, layers, *counted, settings.seed, measure)


def paired_error(
    one: Bool[Tensor, " examples"], other: Bool[Tensor, " examples"], offsets: Int[Tensor, " starts"]
) -> float:
    """Standard error of the difference between the fractions of labelled examples that two layers have right.

    Labels of one image are met or missed together, so its examples, from one of ``offsets`` to the next, count as one.
    """
    image_index = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    differences = torch.zeros(len(offsets) - 1).double().index_add_(0, image_index, one.double() - other.double())
    return float(differences.norm()) / len(one)


def column_groups(
    layers: Sequence[LayerInfo], classes: int, batch_images: int, budget: int
) -> list[list[_ColumnRange]]:
    """Layers, in order, in groups whose class means (float64) and batch features (float32) fit ``budget``."""
    groups: list[list[_ColumnRange]] = [[]]
    free = budget
    for layer in layers:
        width = math.prod(layer.shape)
        features, means = 4 * batch_images * width, 8 * classes * width
        if features + means <= budget:
            if features + means > free:
                groups.append([])
                free = budget
            groups[-1].append(_ColumnRange(layer, 0, width))
            free -= features + means
            continue
        step = min(width, max(MIN_COLUMNS, (budget - features) // (8 * classes)))
        groups += [[_ColumnRange(layer, start, min(width, start + step))] for start in range(0, width, step)]
        groups.append([])
        free = budget
    return [group for group in groups if group]


class _Measurement:
    """Passes over this process's images, and the sums that they add up for each layer."""

    def __init__(self, train: ImageDataset, val: ImageDataset, counts: Tensor, compute: Compute) -> None:
        reducer = compute.reducer
        self.train = reducer.shard(train)
        self.val = reducer.shard(val)
        self.own_examples = reducer.shard_examples(val).to(counts.device)
        self.val_examples = val.examples
        self.val_offsets = val.offsets
        self.counts = counts
        self.compute = compute
        self.sums: dict[str, _LayerSums] = {}
        self.distances = torch.empty(0)

    @torch.inference_mode()
    def add_scatter(self, backbone: Backbone, group: Sequence[_ColumnRange], label: str) -> list[Tensor]:
        """Pass over the training images; returns the class means (classes, columns) of every column range."""
        device = self.counts.device
        statistics = [ClassScatter(len(self.counts), part.stop - part.start, device) for part in group]
        step, order = _columns(backbone, group), stable_order(self.train.first_labels())
        for features, batch in passes(self.train, self.compute, f"{label}: class statistics", step, order=order):
            pairs = class_pairs(batch.labels, batch.image_index, device)
            for columns, scatter in zip(features, statistics, strict=True):
                scatter.add(columns, pairs)
        for part, scatter in zip(group, statistics, strict=True):
            scatter.all_reduce(self.compute.reducer.sum_)
            between, magnitude = between_scatter(scatter.means, self.counts)
            sums = self.sums.setdefault(part.layer.name, _LayerSums())
            sums.within += float(scatter.within)
            sums.between += float(between)
            sums.magnitude += float(magnitude)
            if not math.isfinite(sums.within + sums.between):
                raise FitError(
                    f"expected finite features, layer {part.layer.name} gives NaN or infinity on {self.train.name}; "
                    "check the weights and the preprocessing"
                )
        return [scatter.means for scatter in statistics]

    def correct(self, layer: str) -> Bool[Tensor, " examples"]:
        """Return whether each labelled validation example's nearest class mean after ``layer`` is that of its label."""
        return torch.from_numpy(np.unpackbits(self.sums[layer].correct, count=self.val_examples)).bool()

    def nc4(self, layer: str) -> float:
        """NC4 after ``layer``."""
        return int(self.correct(layer).sum()) / self.val_examples

    def error(self, layer: str, best: str) -> float:
        """Standard error of the difference between NC4 after ``layer`` and after ``best``."""
        return paired_error(self.correct(layer), self.correct(best), self.val_offsets)

    @torch.inference_mode()
    def add_correct(self, backbone: Backbone, group: Sequence[_ColumnRange], means: list[Tensor], label: str) -> None:
        """Pass over the validation images; ``means`` are overwritten."""
        device = self.counts.device
        correct = torch.zeros(len(group), self.val_examples, dtype=torch.uint8, device=device)
        centroids = [Centroids(class_means) for class_means in means]
        seen = seen_examples = 0
        for features, batch in passes(self.val, self.compute, f"{label}: nearest mean", _columns(backbone, group)):
            where = slice(seen, seen := seen + len(batch.images))
            image_index, labels = batch.image_index.to(device), batch.labels.to(device)
            own = self.own_examples[seen_examples : (seen_examples := seen_examples + len(labels))]
            for i, (part, columns) in enumerate(zip(group, features, strict=True)):
                distances = centroids[i].distances(columns)
                if part.start > 0 or not part.is_last:  # distances of column ranges add up
                    if part.start == 0 and where.start == 0:
                        self.distances = torch.zeros(len(self.val), distances.shape[1], dtype=distances.dtype)
                    distances = self.distances[where].add_(distances.cpu())
                if part.is_last:
                    correct[i, own] = (distances.argmin(1).to(device)[image_index] == labels).to(correct.dtype)
        for part, row in zip(group, self.compute.reducer.sum_(correct).cpu().numpy(), strict=True):
            if part.is_last:
                self.sums[part.layer.name].correct = np.packbits(row)


def _columns(backbone: Backbone, group: Sequence[_ColumnRange]) -> FeatureStep:
    """A function of images that returns the features (batch, columns) of every column range of the group."""
    step = feature_step(backbone)

    def columns(images: Tensor) -> list[Tensor]:
        flat = {name: output.flatten(1) for name, output in zip(backbone.layers, step(images), strict=True)}
        return [flat[part.layer.name][:, part.start : part.stop] for part in group]

    return columns
