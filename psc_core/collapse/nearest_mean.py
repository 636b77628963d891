"""Measure NC4 of every layer: the fraction of selection examples whose nearest class mean is that of their label.

:mod:`.measure` has the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from psc_core.collapse.columns import LayerGroup, columns_of
from psc_core.collapse.quality import LayerQuality, Round
from psc_core.collapse.report import NC4
from psc_core.compute.class_passes import distances_to_means
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.network.backbone import Backbone, feature_step


class NearestMean(LayerQuality):
    """The accuracy of the nearest class mean; it keeps one bit for each labelled example and layer."""

    measure = NC4

    def __init__(self, train: ImageDataset, selection: ImageDataset, compute: Compute) -> None:
        super().__init__(train, selection, compute)
        self._hits: dict[str, npt.NDArray[np.uint8]] = {}  # bits, one an example

    @torch.inference_mode()
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Read the selection images once for each round, and note which examples each layer gets right."""
        reducer, device = self.compute.reducer, self.compute.device
        shard, shard_examples = reducer.shard(self.selection), reducer.shard_examples(self.selection).to(device)
        kept: Tensor | None = None  # distances of the ranges so far, of a layer in several
        for ranges, means in rounds:
            if kept is None and not ranges[0].is_whole:
                kept = torch.zeros(len(shard), len(self.selection.classes), dtype=torch.float64)
            hits = torch.zeros(len(ranges), self.selection.examples, dtype=torch.uint8, device=device)
            images = examples = 0
            take = partial(columns_of, ranges=ranges)
            step, description = feature_step(backbone), f"{label}: nearest mean"
            for batch, _, found in distances_to_means(means, shard, self.compute, description, step, take):
                where = slice(images, images := images + len(batch.images))
                image_index, labels = batch.image_index.to(device), batch.labels.to(device)
                at = shard_examples[examples : (examples := examples + len(labels))]
                for row, (part, distances) in enumerate(zip(ranges, found, strict=True)):
                    total = distances if kept is None else kept[where].add_(distances.cpu())
                    if part.is_last:
                        hits[row, at] = (total.argmin(1).to(device)[image_index] == labels).to(hits.dtype)
            for part, of_layer in zip(ranges, reducer.sum_(hits).cpu().numpy(), strict=True):
                if part.is_last:
                    self._hits[part.layer.name] = np.packbits(of_layer)

    def hits(self, layer: str) -> Bool[Tensor, " examples"]:
        """Return whether each labelled selection example's nearest class mean after ``layer`` is that of its label."""
        return torch.from_numpy(np.unpackbits(self._hits[layer], count=self.selection.examples)).bool()

    def value(self, layer: str) -> float:
        """Return NC4 after ``layer``."""
        return int(self.hits(layer).sum()) / self.selection.examples

    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between NC4 after ``layer`` and after ``best``."""
        return paired_error(self.hits(layer), self.hits(best), self.selection.offsets)


def paired_error(
    one: Bool[Tensor, " examples"], other: Bool[Tensor, " examples"], offsets: Int[Tensor, " starts"]
) -> float:
    """Return the standard error of the difference between the fractions of examples that two layers get right.

    Labels of one image are hit or missed together, so its examples, from one of ``offsets`` to the next, count as one.
    """
    image_index = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    differences = torch.zeros(len(offsets) - 1).double().index_add_(0, image_index, one.double() - other.double())
    return float(differences.norm()) / len(one)
