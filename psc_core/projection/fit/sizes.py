"""Measure NC1 and NC4 of the scaled layer and of every projection size, in one pass over each data set.

The first pass goes over the training images, class by class, and accumulates the class statistics of the scaled layer X
(B, C · d) and of its largest projection Z (B, c_max · d_max); :mod:`.ranks` derives those of smaller ones.  The second
pass goes over the selection split and counts the examples whose nearest class mean is right.  Where the class means of
the scaled layer do not fit the memory budget, both passes are repeated for ranges of its columns, over which scatter
and distances add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from psc_core.compute.class_passes import add_statistics, distances_to_means
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.network.backbone import FeatureStep
from psc_core.numerics.scatter import MIN_COLUMNS, ClassScatter, ScatterSums
from psc_core.projection.fit.ranks import nc1_prefixes, nearest_mean_hits
from psc_core.projection.module import Projection


@dataclass(frozen=True)
class Sizes:
    """NC1 and NC4 of the scaled layer and of every projection size, and the class statistics of the largest."""

    scaled_nc1: float
    scaled_nc4: float
    nc1: Tensor
    nc4: Tensor
    block: ClassScatter


def measure_sizes(
    largest: Projection, train: ImageDataset, selection: ImageDataset, compute: Compute, step: FeatureStep
) -> Sizes:
    """Measure all sizes, by both passes for each range of columns whose class means fit ``compute.max_memory``.

    Args:
        largest: The largest projection, without second scaling, on the device.
        train: This process's shard of the training images.
        selection: Images that NC4 is measured on.
        compute: Device, batch size, memory and processes.
        step: A function from a batch of images to the features of the candidate.
    """
    classes, device = len(train.classes), compute.device
    c_max, d_max = largest.c_proj, largest.d_proj
    width = largest.mean.numel()
    columns_at_once = min(width, max(MIN_COLUMNS, compute.max_memory // (8 * classes)))
    ranges = [slice(start, min(width, start + columns_at_once)) for start in range(0, width, columns_at_once)]
    block = ClassScatter(classes, c_max * d_max, device, by_column=True)
    hits = torch.zeros(c_max, d_max, dtype=torch.int64, device=device)
    scaled_hits = torch.zeros((), dtype=torch.int64, device=device)
    sums = ScatterSums()
    kept = torch.zeros(len(selection) if len(ranges) > 1 else 0, classes, dtype=torch.float64)
    for number, columns in enumerate(ranges):
        is_first = number == 0
        take = partial(_columns, largest=largest, columns=columns, is_first=is_first)
        scaled = ClassScatter(classes, columns.stop - columns.start, device)
        statistics = [scaled, block] if is_first else [scaled]
        add_statistics(statistics, train, compute, "class statistics", step, take)
        sums.add(scaled)
        seen = 0
        for batch, found, (here,) in distances_to_means([scaled.means], selection, compute, "sizes", step, take):
            labels, image_index = batch.labels.to(device), batch.image_index.to(device)
            if len(ranges) > 1:
                at = slice(seen, seen := seen + len(here))
                here = kept[at].add_(here.cpu()).to(device)
            if columns.stop == width:
                scaled_hits += (here.argmin(1)[image_index] == labels).sum()
            if is_first:
                z, means = (part.view(-1, c_max, d_max) for part in (batch.per_example(found[1]), block.means))
                hits += nearest_mean_hits(z, means, labels)
    nc1 = nc1_prefixes(block.within.view(c_max, d_max), block.total().view(c_max, d_max))
    scaled_nc4 = int(scaled_hits) / selection.examples
    return Sizes(sums.nc1, scaled_nc4, nc1, hits.double() / selection.examples, block)


def _columns(features: list[Tensor], largest: Projection, columns: slice, *, is_first: bool) -> list[Tensor]:
    """Return a range of columns (B, columns) of the scaled layer, and with the first range Z (B, c_max · d_max)."""
    x = largest.scaled(features)
    return [x.flatten(1)[:, columns], *([largest.project(x).flatten(1)] if is_first else [])]
