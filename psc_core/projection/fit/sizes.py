"""NC1 and NC4 of the scaled layer and of every projection size, in one pass over each data set.

Images come class by class in the first, over the training images, which accumulates the class statistics of both the
scaled layer and its largest projection (:mod:`.ranks` for the smaller ones).  The second, over the selection split,
counts nearest-class-mean hits.  Where the class means of the scaled layer do not fit the memory budget, both are
repeated for ranges of its columns, over which scatter and distances add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset, stable_order
from psc_core.network.backbone import FeatureStep
from psc_core.numerics.scatter import (
    MIN_COLUMNS,
    Centroids,
    ClassScatter,
    between_scatter,
    class_pairs,
    nc1_from_scatter,
)
from psc_core.projection.fit.ranks import nc1_prefixes, nearest_mean_hits
from psc_core.projection.module import Projection


@dataclass(frozen=True)
class Sizes:
    """NC1 and NC4 of the scaled layer and of every projection size, and the statistics of the largest."""

    scaled_nc1: float
    scaled_nc4: float
    nc1: Tensor
    nc4: Tensor
    block: ClassScatter


def measure_sizes(
    largest: Projection, train: ImageDataset, selection: ImageDataset, compute: Compute, step: FeatureStep
) -> Sizes:
    """Run both passes, once for each range of columns of the scaled layer whose class means fit ``compute.max_memory``.

    Args:
        largest: The largest projection, without second scaling, on the device.
        train: This process's shard of the training images.
        selection: Images that NC4 is measured on.
        compute: Device, batch size, memory and processes.
        step: Features of a batch of images.
    """
    classes, device = len(train.classes), compute.device
    c_max, d_max = largest.c_proj, largest.d_proj
    width = largest.mean.numel()
    columns_at_once = min(width, max(MIN_COLUMNS, compute.max_memory // (8 * classes)))
    ranges = [slice(start, min(width, start + columns_at_once)) for start in range(0, width, columns_at_once)]
    block = ClassScatter(classes, c_max * d_max, device, by_column=True)
    hits = torch.zeros(c_max, d_max, dtype=torch.int64, device=device)
    scaled_hits = torch.zeros((), dtype=torch.int64, device=device)
    within = between = level = 0.0
    order = stable_order(train.first_labels())
    distances = torch.zeros(len(selection) if len(ranges) > 1 else 0, classes, dtype=torch.float64)
    for columns in ranges:
        first, last = columns.start == 0, columns.stop == width
        scaled = ClassScatter(classes, columns.stop - columns.start, device)
        for features, batch in passes(train, compute, "class statistics", step, order=order):
            pairs = class_pairs(batch.labels, batch.image_index, device)
            x = largest.scaled(features)
            scaled.add(x.flatten(1)[:, columns], pairs)
            if first:
                block.add(largest.project(x).flatten(1), pairs)
        scaled.all_reduce(compute.reducer.sum_)
        if first:
            block.all_reduce(compute.reducer.sum_)
            means = block.means.view(-1, c_max, d_max)
        parts = between_scatter(scaled.means, scaled.counts)
        within, between, level = within + float(scaled.within), between + float(parts[0]), level + float(parts[1])
        centroids = Centroids(scaled.means)
        seen = 0
        for features, batch in passes(selection, compute, "sizes", step):
            labels, image_index = batch.labels.to(device), batch.image_index.to(device)
            x = largest.scaled(features)
            here = centroids.distances(x.flatten(1)[:, columns])
            if len(ranges) > 1:
                at = slice(seen, seen := seen + len(here))
                here = distances[at].add_(here.cpu()).to(device)
            if last:
                scaled_hits += (here.argmin(1)[image_index] == labels).sum()
            if first:
                hits += nearest_mean_hits(batch.per_example(largest.project(x)), means, labels)
    nc1 = nc1_prefixes(block.within.view(c_max, d_max), block.total().view(c_max, d_max))
    scaled_nc4 = int(scaled_hits) / selection.examples
    return Sizes(nc1_from_scatter(within, between, level), scaled_nc4, nc1, hits.double() / selection.examples, block)
