"""Measure how well linear functions of each layer predict a regression's target: two passes, training then validation.

:mod:`psc_core.collapse.ridge` has the mathematics.  Layers are read in groups whose features fit the memory budget, two
passes per group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.collapse.ridge import CountSketch, RidgeSums, fit_ridge, r_squared, r_squared_error
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset
from psc_core.data.targets import known_values
from psc_core.network.backbone import feature_step, truncate
from psc_core.network.layers import LayerInfo


@dataclass(frozen=True)
class SquaredErrors:
    """The squared errors of ridge regressions, on the CPU."""

    y: Float[Tensor, " n"]  # numbers of the validation images
    by_layer: dict[str, Float[Tensor, " n"]]  # squared error of each

    def r_squared(self, layer: str) -> float:
        """R² after ``layer``."""
        return r_squared(self.by_layer[layer], self.y)

    def error(self, layer: str, best: str) -> float:
        """Standard error of the difference between R² after ``layer`` and after ``best``."""
        return r_squared_error(self.by_layer[layer], self.by_layer[best], self.y)


@torch.inference_mode()
def squared_errors(
    net: nn.Module,
    layers: Sequence[LayerInfo],
    train: ImageDataset,
    val: ImageDataset,
    compute: Compute,
    example: Tensor,
) -> SquaredErrors:
    """Fit a ridge regression to every layer and predict the validation images.

    Args:
        net: Its features are finite; on the device.
        layers: To be read, in order.
        train: With numbers.
        val: With numbers.
        compute: Its memory is for the features of one batch of all layers of a group.
        example: One input.
    """
    reducer = compute.reducer
    own = torch.arange(reducer.rank, len(val), reducer.world)
    found: dict[str, Tensor] = {}
    for group in _groups(layers, 4 * compute.batch_size, compute.max_memory):
        names = [layer.name for layer in group]
        step = feature_step(truncate(net, names, keep_output=False, example=example))
        sketches = [CountSketch(math.prod(layer.shape), compute.device) for layer in group]
        sums = [RidgeSums(sketch.columns, compute.device) for sketch in sketches]
        for features, batch in passes(reducer.shard(train), compute, "collapse: linear fits", step):
            y = known_values(batch.values).to(compute.device)
            for sketch, layer, of_layer in zip(sketches, features, sums, strict=True):
                of_layer.add(sketch(layer.flatten(1)), y)
        ridges = []
        for of_layer in sums:
            of_layer.all_reduce(reducer.sum_)
            ridges.append(fit_ridge(of_layer))
        errors = torch.zeros(len(group), len(val), dtype=torch.float64)
        seen = 0
        for features, batch in passes(reducer.shard(val), compute, "collapse: linear predictions", step):
            at, y = own[seen : seen + len(batch.images)], known_values(batch.values).to(compute.device)
            seen += len(batch.images)
            for row, (sketch, ridge, layer) in enumerate(zip(sketches, ridges, features, strict=True)):
                errors[row, at] = (ridge(sketch(layer.flatten(1))) - y).square().cpu()
        found |= dict(zip(names, reducer.sum_(errors), strict=True))
    return SquaredErrors(known_values(val.values), found)


def _groups(layers: Sequence[LayerInfo], bytes_per_feature: int, budget: int) -> list[list[LayerInfo]]:
    """Layers, in order, in groups whose features fit ``budget``; a layer that does not is a group by itself."""
    groups: list[list[LayerInfo]] = [[]]
    free = budget
    for layer in layers:
        size = bytes_per_feature * math.prod(layer.shape)
        if groups[-1] and size > free:
            groups.append([])
            free = budget
        groups[-1].append(layer)
        free -= size
    return groups
