"""Measure R² of every layer: how well linear functions of it predict a regression's target.

Each group of layers takes two passes, over the training images and over the validation images;
:mod:`psc_core.collapse.ridge` has the mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.collapse.columns import LayerGroup
from psc_core.collapse.quality import LayerQuality, Round
from psc_core.collapse.report import R2
from psc_core.collapse.ridge import CountSketch, RidgeSums, fit_ridge
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset
from psc_core.data.targets import known_values
from psc_core.network.backbone import Backbone, feature_step
from psc_core.numerics.explained import r_squared, r_squared_error


class LinearFit(LayerQuality):
    """R² of ridge regressions; it keeps the squared error of every validation image for each layer."""

    measure = R2

    def __init__(self, train: ImageDataset, val: ImageDataset, compute: Compute) -> None:
        super().__init__(train, val, compute)
        self._errors: dict[str, Float[Tensor, " n"]] = {}

    @torch.inference_mode()
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Fit a ridge regression to every layer of the group, and predict the validation images by it."""
        for _ in rounds:  # Linear fits need no class means.
            pass
        compute, reducer = self.compute, self.compute.reducer
        shard = torch.arange(reducer.rank, len(self.val), reducer.world)
        step = feature_step(backbone)
        sketches = [CountSketch(math.prod(layer.shape), compute.device) for layer in group.layers]
        sums = [RidgeSums(sketch.columns, compute.device) for sketch in sketches]
        for features, batch in passes(reducer.shard(self.train), compute, f"{label}: linear fits", step):
            y = known_values(batch.values).to(compute.device)
            for sketch, layer, of_layer in zip(sketches, features, sums, strict=True):
                of_layer.add(sketch(layer.flatten(1)), y)
        ridges = []
        for of_layer in sums:
            of_layer.all_reduce(reducer.sum_)
            ridges.append(fit_ridge(of_layer))
        errors = torch.zeros(len(ridges), len(self.val), dtype=torch.float64)
        seen = 0
        for features, batch in passes(reducer.shard(self.val), compute, f"{label}: linear predictions", step):
            at, y = shard[seen : seen + len(batch.images)], known_values(batch.values).to(compute.device)
            seen += len(batch.images)
            for row, (sketch, ridge, layer) in enumerate(zip(sketches, ridges, features, strict=True)):
                errors[row, at] = (ridge(sketch(layer.flatten(1))) - y).square().cpu()
        self._errors |= {layer.name: row for layer, row in zip(group.layers, reducer.sum_(errors), strict=True)}

    def value(self, layer: str) -> float:
        """Return R² after ``layer``."""
        return r_squared(self._errors[layer], known_values(self.val.values))

    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between R² after ``layer`` and after ``best``."""
        return r_squared_error(self._errors[layer], self._errors[best], known_values(self.val.values))
