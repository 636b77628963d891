"""Group layers that are read together, and split wide ones into ranges of columns that fit the memory budget.

A layer of shape (C, d) has C · d columns; its class means take classes × columns × 8 bytes, and the features of a batch
images × columns × 4 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from psc_core.network.layers import LayerInfo
from psc_core.numerics.scatter import MIN_COLUMNS


@dataclass(frozen=True)
class ColumnRange:
    """The columns from ``start`` to ``stop``, exclusive, of a layer's flattened features."""

    layer: LayerInfo
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the range ends with the layer."""
        return self.stop == math.prod(self.layer.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the range is all of the layer."""
        return self.start == 0 and self.is_last


@dataclass(frozen=True)
class LayerGroup:
    """Layers that the network is cut behind at once.

    Attributes:
        rounds: The ranges that are read in the same pass over the images: several layers, each whole, in one round, or
            the parts of one layer in several rounds.
    """

    rounds: tuple[tuple[ColumnRange, ...], ...]

    @property
    def layers(self) -> list[LayerInfo]:
        """The layers, in order."""
        return [columns.layer for columns in self.rounds[0]]


def layer_groups(layers: Sequence[LayerInfo], classes: int, batch_images: int, budget: int) -> list[LayerGroup]:
    """Return the layers, in order, in groups whose class means and batch features fit ``budget``, bytes."""
    groups: list[LayerGroup] = []
    together: list[ColumnRange] = []
    free = budget
    for layer in layers:
        width = math.prod(layer.shape)
        features, means = 4 * batch_images * width, 8 * classes * width
        if together and features + means > free:
            groups.append(LayerGroup((tuple(together),)))
            together, free = [], budget
        if features + means <= budget:
            together.append(ColumnRange(layer, 0, width))
            free -= features + means
        else:
            step = min(width, max(MIN_COLUMNS, (budget - features) // (8 * classes)))
            parts = (ColumnRange(layer, start, min(width, start + step)) for start in range(0, width, step))
            groups.append(LayerGroup(tuple((part,) for part in parts)))
    return [*groups, *([LayerGroup((tuple(together),))] if together else [])]


def columns_of(features: Sequence[Tensor], ranges: Sequence[ColumnRange]) -> list[Tensor]:
    """Return the columns (batch, columns) of each range of a round, from the features of the group's layers."""
    return [layer.flatten(1)[:, part.start : part.stop] for layer, part in zip(features, ranges, strict=True)]
