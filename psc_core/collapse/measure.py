"""Neural collapse after every layer: NC1 on the training rows, NC4 on the validation rows.

For each layer, with the sums of :mod:`psc_core.numerics.scatter`,

    NC1 = Tr(Σ_W) / Tr(Σ_T)      within-class share of the variability, training rows
    NC4 = share of validation rows whose nearest class mean (Euclidean) is their label

(paper, section 4.1 and appendix "Measuring collapse": after each layer).  One pass over the training images, class
by class, and one over the validation images.

Class means take classes × width × 8 bytes a layer.  Layers share passes in groups that fit the memory budget;
a layer that does not fit alone is measured in column ranges, over which scatter and distances add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from psc_core.collapse.candidate import EPSILON, LayerCollapse
from psc_core.collapse.report import CollapseReport
from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import Batch, ImageDataset, by_class
from psc_core.errors import FitError, UsageError
from psc_core.network.backbone import Backbone, feature_step, truncate
from psc_core.network.layers import LayerInfo, list_layers, select_layers
from psc_core.numerics.scatter import MIN_COLUMNS, Centroids, ClassScatter, between_scatter, class_rows, variability

DEFAULT_MEMORY_BYTES = 1 << 30
"""Budget for class means and batch features."""


@dataclass(frozen=True)
class _Part:
    """Columns ``start … stop`` of a layer's features."""

    layer: LayerInfo
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == math.prod(self.layer.shape)

    @property
    def is_last(self) -> bool:
        return self.stop == math.prod(self.layer.shape)


@dataclass
class _Sums:
    """What has been added up for one layer."""

    within: float = 0.0
    between: float = 0.0
    level: float = 0.0
    correct: int = 0


def measure_collapse(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    *,
    epsilon: float = EPSILON,
    layers: str | None = None,
    granularity: str = "operations",
    max_memory_bytes: int = DEFAULT_MEMORY_BYTES,
    device: str | torch.device = "cpu",
    batch_images: int = 128,
    reduce: Reducer | None = None,
) -> CollapseReport:
    """Measure NC1 and NC4 after the layers of ``net``.

    Args:
        net: A classifier; it is moved to ``device`` and put in evaluation mode.
        train: Images NC1 is measured on, all of them: each process takes its own share.
        val: Images NC4 is measured on, likewise.
        epsilon: Neural collapse cutoff, kept in the report.
        layers: Regular expression; only matching layers, and always the penultimate one, are measured.
        granularity: ``"operations"``, ``"blocks"`` or ``"all"``, see :mod:`psc_core.network.layers`.
        max_memory_bytes: Budget for class means and for the features of one batch.
        device: Where the network runs and the sums are kept; it must know float64.
        batch_images: Images a batch at most.
        reduce: This process among its peers; alone by default.

    Raises:
        FitError: A class without training images, other classes in ``val``, or features that are not finite.
        UsageError: ``epsilon`` outside (0, 1), or a pattern that matches no layer.
        NetworkError: The network cannot be run or cut.
    """
    if not 0.0 < epsilon < 1.0:
        raise UsageError(f"expected epsilon between 0 and 1, got {epsilon}")
    counts, notes = _class_counts(train, val)
    example = train.preprocess.normalise(torch.tensor(train.image(0), device=device)[None])
    every = list_layers(net.to(device), example, granularity=granularity)
    names = {layer.name for layer in select_layers(every, layers)}
    wanted = [layer for layer in every if layer.name in names or layer.role == "penultimate"]
    compute = Compute(torch.device(device), "fp32", batch_images)
    station = _Station(counts.double().to(device), compute, reduce or Reducer())
    groups = _groups(wanted, len(counts), compute.images, max_memory_bytes)
    for number, group in enumerate(groups, 1):
        cut_after = list(dict.fromkeys(part.layer.name for part in group))
        backbone = truncate(net, cut_after, keep_output=False, example=example)
        station.measure(backbone, group, train, val, f"collapse {number}/{len(groups)}")
    measured = [station.result(layer, val.examples) for layer in wanted]
    return CollapseReport(tuple(measured), epsilon, granularity, layers, train.examples, val.examples, notes)


def _class_counts(train: ImageDataset, val: ImageDataset) -> tuple[Tensor, tuple[str, ...]]:
    """Training rows a class, and remarks on them."""
    if train.classes != val.classes:
        raise FitError(
            f"expected the same classes in training and validation data, got {len(train.classes)} "
            f"({', '.join(train.classes[:4])}, …) and {len(val.classes)} ({', '.join(val.classes[:4])}, …)"
        )
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    missing = [train.classes[i] for i in torch.nonzero(counts == 0).flatten().tolist()]
    if missing:
        raise FitError(
            f"expected training images of all {len(train.classes)} classes, {_some(missing)} has none; add images or "
            "remove the class"
        )
    single = [train.classes[i] for i in torch.nonzero(counts == 1).flatten().tolist()]
    if not single:
        return counts, ()
    return counts, (f"one training image only for {_some(single)}: no within-class variability, which lowers NC1",)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def _groups(layers: Sequence[LayerInfo], classes: int, batch_images: int, budget: int) -> list[list[_Part]]:
    """Layers, in order, in groups whose class means (float64) and batch features (float32) fit ``budget``."""
    groups: list[list[_Part]] = [[]]
    free = budget
    for layer in layers:
        width = math.prod(layer.shape)
        features, means = 4 * batch_images * width, 8 * classes * width
        if features + means <= budget:
            if features + means > free:
                groups.append([])
                free = budget
            groups[-1].append(_Part(layer, 0, width))
            free -= features + means
            continue
        step = min(width, max(MIN_COLUMNS, (budget - features) // (8 * classes)))
        groups += [[_Part(layer, start, min(width, start + step))] for start in range(0, width, step)]
        groups.append([])
        free = budget
    return [group for group in groups if group]


class _Station:
    """The passes over the data and the sums they leave."""

    def __init__(self, counts: Tensor, compute: Compute, reduce: Reducer) -> None:
        self.counts = counts
        self.compute = compute
        self.reduce = reduce
        self.sums: dict[str, _Sums] = {}
        self.scores: dict[str, Tensor] = {}

    @torch.inference_mode()
    def measure(
        self, backbone: Backbone, group: Sequence[_Part], train: ImageDataset, val: ImageDataset, label: str
    ) -> None:
        """Two passes for one group of layers."""
        statistics = self._statistics(backbone, group, self.reduce.shard(train), label)
        for part, scatter in zip(group, statistics, strict=True):
            between, level = between_scatter(scatter.means, self.counts)
            sums = self.sums.setdefault(part.layer.name, _Sums())
            sums.within += float(scatter.within)
            sums.between += float(between)
            sums.level += float(level)
            if not math.isfinite(sums.within + sums.between):
                raise FitError(
                    f"expected finite features, layer {part.layer.name} gives NaN or infinity on {train.name}; check "
                    "the weights and the preprocessing"
                )
        self._nearest_means(backbone, group, self.reduce.shard(val), [scatter.means for scatter in statistics], label)

    def _statistics(
        self, backbone: Backbone, group: Sequence[_Part], train: ImageDataset, label: str
    ) -> list[ClassScatter]:
        device = self.counts.device
        statistics = [ClassScatter(len(self.counts), part.stop - part.start, device) for part in group]
        for batch, features in self._passes(backbone, group, train, f"{label}: class statistics", by_class(train)):
            rows = class_rows(batch.labels, batch.image_index, device)
            for columns, scatter in zip(features, statistics, strict=True):
                scatter.add(columns, rows)
        for scatter in statistics:
            scatter.all_reduce(self.reduce.sum_)
        return statistics

    def _nearest_means(
        self, backbone: Backbone, group: Sequence[_Part], val: ImageDataset, means: Sequence[Tensor], label: str
    ) -> None:
        correct = torch.zeros(len(group), dtype=torch.int64, device=self.counts.device)
        centroids = [Centroids(class_means) for class_means in means]
        seen = 0
        for batch, features in self._passes(backbone, group, val, f"{label}: nearest mean"):
            rows = slice(seen, seen := seen + len(batch.images))
            image_index, labels = batch.image_index.to(correct.device), batch.labels.to(correct.device)
            for i, (part, columns) in enumerate(zip(group, features, strict=True)):
                scores = centroids[i].scores(columns)
                if not part.is_whole:
                    scores = self._add_scores(part, len(val), rows, scores)
                if part.is_last:
                    correct[i] += (scores.argmin(1).to(correct.device)[image_index] == labels).sum()
        for part, hits in zip(group, self.reduce.sum_(correct).tolist(), strict=True):
            self.sums[part.layer.name].correct += hits

    def _add_scores(self, part: _Part, images: int, rows: slice, scores: Tensor) -> Tensor:
        """Add one column range's scores to those of the ranges before it; the sum."""
        name = part.layer.name
        if part.start == 0 and rows.start == 0:
            self.scores[name] = torch.zeros(images, scores.shape[1], dtype=scores.dtype)
        self.scores[name][rows] += scores.cpu()
        total = self.scores[name][rows]
        if part.is_last and rows.stop == images:
            del self.scores[name]
        return total

    def _passes(
        self,
        backbone: Backbone,
        group: Sequence[_Part],
        dataset: ImageDataset,
        description: str,
        order: Tensor | None = None,
    ) -> Iterator[tuple[Batch, list[Tensor]]]:
        """Batches with the features (batch, columns) of every part of the group."""
        for outputs, batch in passes(dataset, self.compute, description, feature_step(backbone), order=order):
            flat = {name: output.flatten(1) for name, output in zip(backbone.layers, outputs, strict=True)}
            yield batch, [flat[part.layer.name][:, part.start : part.stop] for part in group]

    def result(self, layer: LayerInfo, val_rows: int) -> LayerCollapse:
        """NC1 and NC4 of a layer all of whose parts are measured."""
        sums = self.sums[layer.name]
        return LayerCollapse(
            layer.name,
            layer.index,
            layer.kind,
            layer.shape,
            layer.grid,
            layer.role,
            variability(sums.within, sums.between, sums.level),
            sums.correct / val_rows,
        )
