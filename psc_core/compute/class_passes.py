"""The two passes of a nearest-class-mean classifier: class statistics of features, then distances to the class means.

Features are split into ranges of columns, over which scatter and distances add up (:mod:`psc_core.numerics.scatter`),
so that the class means of wide features fit into memory, one range at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import Batch, ImageDataset, stable_order
from psc_core.numerics.scatter import Centroids, ClassScatter, class_pairs

Step = Callable[[Tensor], list[Tensor]]
"""A function from standardised images to the features of each layer."""

Ranges = Callable[[list[Tensor]], Sequence[Tensor]]
"""A function from these features to the columns (batch, columns) of each range."""


class BatchDistances(NamedTuple):
    """A batch and its distances to the class means."""

    batch: Batch
    columns: Sequence[Tensor]  # of each range
    distances: Sequence[Tensor]  # (batch, classes) for each range with means, see :class:`.Centroids`


def add_statistics(
    statistics: Sequence[ClassScatter], data: ImageDataset, compute: Compute, description: str, step: Step, of: Ranges
) -> None:
    """Add the images of this process class by class, then sum over all processes.

    Args:
        statistics: One for each range.
        data: The images of this process.
        compute: The device, batch size and processes.
        description: The label of the progress bar.
        step: A function from a batch of images to features.
        of: A function from features to the columns of each range.
    """
    for features, batch in passes(data, compute, description, step, order=stable_order(data.first_labels())):
        pairs = class_pairs(batch.labels, batch.image_index, compute.device)
        for columns, scatter in zip(of(features), statistics, strict=True):
            scatter.add(columns, pairs)
    for scatter in statistics:
        scatter.all_reduce(compute.reducer.sum_)


def distances_to_means(
    means: Sequence[Tensor], data: ImageDataset, compute: Compute, description: str, step: Step, of: Ranges
) -> Iterator[BatchDistances]:
    """Yield the distances of every batch of ``data``, in order.

    Args:
        means: (classes, columns) of the leading ranges; overwritten.
        data: The images.
        compute: The device, batch size and processes.
        description: The label of the progress bar.
        step: A function from a batch of images to features.
        of: A function from features to the columns of each range.
    """
    centroids = [Centroids.of(class_means) for class_means in means]
    for features, batch in passes(data, compute, description, step):
        columns = of(features)
        distances = [each.distances(part) for each, part in zip(centroids, columns, strict=False)]
        yield BatchDistances(batch, columns, distances)
