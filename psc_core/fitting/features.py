"""Read a network once over a data set, and keep on disk the features that the last stage of a fit needs.

The input is the network, cut behind the layers of :class:`Layers`, and a data set of images with n labelled examples;
an image may carry several labels, and all its examples have the same features.  The output is
:class:`KeptFeatures`, whose rows are the labelled examples, ordered by class, float32:

    ``features.head_input``  (n, D + Σ C)    z, then each layer that the head reads besides it, averaged over positions
    ``features.network_output``  (n, outputs)    the output of the network as trained, where it may be served
    ``density_input``        (n, D) or (n, C)    z, or the candidate's features averaged over positions
    ``texture``              (n, C) by layer     an early layer, averaged over positions

D is the dimension of z, C the channels of a layer.  z, each layer's averages and the output lie in a file each, one
class after the other, because a density reads one class at a time; memory does not grow with n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset, stable_order
from psc_core.density.fit.density import Examples
from psc_core.images.preprocess import Preprocess
from psc_core.maps.fit.moments import MAX_CHANNELS, PositionMoments
from psc_core.maps.grid import grid_of
from psc_core.model.pipeline import average_positions
from psc_core.network.backbone import Backbone, trial_input, truncate
from psc_core.numerics.matrix import FeatureFile, FeatureMatrix, blocks, side_by_side
from psc_core.projection.module import Projection
from psc_core.tasks.fit.task import Features

Z: Final = ".z"
OUTPUT: Final = ".output"
"""The names of z and of the network's output among those of layers, none of which begins with a dot."""


class Layers(NamedTuple):
    """The parts of a network that the last stage reads; an early layer may serve both the head and the gates."""

    candidate: tuple[str, ...]  # projected to z
    head: tuple[str, ...]  # read by the head besides z
    texture: tuple[str, ...]  # early layers, one of which the gate "texture" will read
    output: bool = False  # whether the network's own output is read too

    @property
    def names(self) -> tuple[str, ...]:
        """Each layer once, in the order in which the network is cut behind them."""
        return tuple(dict.fromkeys((*self.candidate, *self.head, *self.texture)))

    def of(self, features: Sequence[Tensor], layers: Iterable[str]) -> list[Tensor]:
        """Return the features of some ``layers``, picked from those of all :attr:`names`."""
        return [features[self.names.index(layer)] for layer in layers]


class KeptFeatures(NamedTuple):
    """The features of n labelled examples that one pass keeps; the module docstring gives their shapes."""

    features: Features  # read by the head, with labels and image indices
    density_input: FeatureMatrix
    texture: Mapping[str, FeatureMatrix]  # by early layer
    moments: Mapping[str, PositionMoments]  # by early layer with a grid, over the images of this process
    file_bytes: int  # of all files together

    def examples(self, features: FeatureMatrix, classes: Sequence[str]) -> Examples:
        """Return the labelled examples with these of their features, as a density is fitted to them."""
        return Examples(features, self.features.labels, len(classes), self.features.images, classes)


def cut(net: nn.Module, layers: Sequence[str], data: ImageDataset, compute: Compute, *, keep_output: bool) -> Backbone:
    """Return ``net`` cut behind ``layers``, on the device, after a trial on one input."""
    trial = trial_input(data.preprocess).to(compute.device)
    return truncate(net.to(compute.device), layers, keep_output=keep_output, trial=trial)


def read(
    backbone: Backbone,
    layers: Layers,
    projection: Projection,
    dataset: ImageDataset,
    compute: Compute,
    folder: Path,
    *,
    pooled: bool,
) -> KeptFeatures:
    """Run the network over a data set and write the features of every labelled example to files in ``folder``.

    Args:
        backbone: The network cut behind ``layers.names``; it keeps its output where ``layers.output`` asks for it.
        layers: The layers, by what reads them.
        projection: From the candidate's features to z, on the device.
        dataset: The images.
        compute: Device, precision, batch size, processes.
        folder: An empty folder; the files lie in it as long as the result is used.
        pooled: Whether the density reads the candidate's features averaged over positions, and not z.
    """
    running = backbone.fused(compute.precision)
    head, density = [Z, *layers.head], [*layers.candidate] if pooled else []
    averaged = dict.fromkeys([*layers.head, *density, *layers.texture])  # Each layer once, whatever reads it.

    def columns_of(found: Sequence[Tensor], output: Tensor | None) -> dict[str, Tensor]:
        columns = {Z: projection(layers.of(found, layers.candidate))}
        columns |= {layer: average_positions(*layers.of(found, [layer])) for layer in averaged}
        return columns if output is None or not layers.output else columns | {OUTPUT: output.float()}

    def step(images: Tensor) -> dict[str, Tensor]:
        found, output = running(images)
        for layer, sums in moments.items():
            sums.add(*layers.of(found, [layer]))
        return columns_of(found, output)

    with torch.inference_mode():
        of_one, output = backbone(trial_input(dataset.preprocess).to(compute.device))
        widths = {name: columns.shape[1] for name, columns in columns_of(of_one, output).items()}
    moments = _moments_of(layers, of_one, dataset.preprocess)
    order = stable_order(dataset.labels)
    files = store(step, widths, dataset, order, compute, folder)

    def matrix(names: Sequence[str], beside: Sequence[str]) -> FeatureMatrix:
        # The rows of a block decide how sums round: as if all of ``beside`` were read, which earlier fits did.
        return side_by_side([files[name] for name in names], widest=sum(widths[name] for name in beside))

    images = torch.arange(len(dataset)).repeat_interleave(dataset.offsets.diff())[order]
    values, of_head = dataset.subset(images).values, tuple(widths[name] for name in head)
    labels, read_together = dataset.labels[order], head + density
    features = Features(matrix(head, read_together), labels, images, of_head, values, files.get(OUTPUT))
    texture = {layer: matrix([layer], layers.texture) for layer in layers.texture}
    file_bytes = sum(file.bytes for file in files.values())
    return KeptFeatures(features, matrix(density or [Z], read_together), texture, moments, file_bytes)


def _moments_of(layers: Layers, of_one: Sequence[Tensor], preprocess: Preprocess) -> dict[str, PositionMoments]:
    """Return empty sums for each early layer that a map can be made from; ``of_one`` are one image's features."""
    found = {}
    for layer, features in zip(layers.texture, layers.of(of_one, layers.texture), strict=True):
        grid = grid_of(features.shape[2], preprocess.height, preprocess.width)
        if grid is not None and features.shape[1] <= MAX_CHANNELS:
            found[layer] = PositionMoments(features.shape[1], grid, features.device)
    return found


def store(
    step: Callable[[Tensor], Mapping[str, Tensor]],
    widths: Mapping[str, int],
    dataset: ImageDataset,
    order: Int[Tensor, " examples"],
    compute: Compute,
    folder: Path,
) -> dict[str, FeatureFile]:
    """Run ``step`` over the images and write its results by name, (B, width), to one file each.

    A file has one row for each labelled example, in ``order``: row i is that of example ``order[i]``.
    """
    reducer = compute.reducer
    files = {
        name: FeatureFile.create(folder / str(number), (dataset.examples, width))
        for number, (name, width) in enumerate(widths.items())
    }
    where = torch.empty_like(order)
    where[order] = torch.arange(len(where))
    if reducer.world > 1:
        where = where[reducer.shard_examples(dataset)]
    at = 0
    for columns, batch in passes(reducer.shard(dataset), compute, "features", step):
        for name, file in files.items():
            values = batch.per_example(columns[name]).cpu()
            file.write(where[at : at + len(values)], values)
        at += len(batch.labels)
    if reducer.world > 1:
        for file in files.values():
            for chunk, block in blocks(file):
                file.write(chunk, reducer.sum_(block))
    return files
