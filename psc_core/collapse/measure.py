"""Measure neural collapse after every layer: NC1 on training data, NC4 on the selection split.

For each layer, with the sums of :mod:`psc_core.numerics.scatter`,

    NC1 = Tr(Σ_W) / Tr(Σ_T)      within-class fraction of the variability, over the labelled training examples
    NC4 = fraction of the labelled selection examples whose nearest class mean (Euclidean) is that of their label
    NC4's error = √(Σ_i d_i²) / examples      standard error of its difference to the best layer's NC4

with d_i the difference in how many labels of selection image i the two layers hit: where each image has one label,
McNemar's √(b + c) / n of the b + c images that one layer gets right and the other wrong.  (Paper, section 4.1 and
appendix A.1: after each layer.)  This takes one pass over the training images, class by class, and one
over the selection images (:mod:`.nearest_mean`).  For a regression the classes are bins of the target, and R² takes
the place of NC4 (:mod:`.linear`), with one more pass over the training images.

Class means take classes × width × 8 bytes per layer.  Layers are measured in groups that fit the memory budget, two
passes per group; a layer that does not fit alone is measured in column ranges (:mod:`.columns`), over which scatter and
distances add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from psc_core.collapse.columns import LayerGroup, columns_of, layer_groups
from psc_core.collapse.quality import LayerQuality, Round
from psc_core.collapse.report import CONSTANT, CollapseReport, LayerCollapse, best_layer
from psc_core.compute.class_passes import add_statistics
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError
from psc_core.network.backbone import Backbone, feature_step, trial_input, truncate
from psc_core.network.layers import list_layers, select_layers
from psc_core.numerics.scatter import ClassScatter, ScatterSums
from psc_core.settings import FitSettings


def measure_layers(
    net: nn.Module,
    train: ImageDataset,
    selection: ImageDataset,
    settings: FitSettings,
    compute: Compute,
    quality_type: type[LayerQuality],
) -> CollapseReport:
    """Measure NC1 and another quality after the layers of ``net``.

    Args:
        net: The trained network, which is moved to the device and put in evaluation mode.
        train: The images that NC1 is measured on, with some of every class; each process reads its own shard.
        selection: The images that the quality is measured on, of the same classes; each process reads its own shard.
        settings: ε, the pattern of the layers' names (the penultimate layer is measured in any case), and the seed by
            which ``selection`` was split off.
        compute: A device that supports float64.  The network runs in float32 whatever the precision, so that the choice
            of the layer does not depend on it.
        quality_type: The quality besides NC1, from :mod:`.nearest_mean` or :mod:`.linear`.

    Raises:
        FitError: If features are not finite.
        UsageError: If a pattern matches no layer.
        NetworkError: If the network cannot be run or cut.
    """
    epsilon, pattern = settings.epsilon, settings.layers
    compute = replace(compute, precision="fp32")
    trial = trial_input(train.preprocess).to(compute.device)
    every = list_layers(net.to(compute.device), trial, granularity=settings.granularity)
    names = {layer.name for layer in select_layers(every, pattern)}
    wanted = [layer for layer in every if layer.name in names or layer.role == "penultimate"]
    sums = {layer.name: ScatterSums() for layer in wanted}
    quality = quality_type(train, selection, compute)
    groups = layer_groups(wanted, len(train.classes), compute.batch_size, compute.max_memory)
    for number, group in enumerate(groups, 1):
        backbone = truncate(net, [layer.name for layer in group.layers], keep_output=False, trial=trial)
        label = f"collapse {number}/{len(groups)}"
        quality.read(backbone, group, _rounds(backbone, group, train, compute, sums, label), label)
    measured = [
        LayerCollapse(
            **vars(layer),
            # Constant features have collapsed, whatever the rounding of their values knows of the classes.
            nc1=CONSTANT if sums[layer.name].is_rounding else sums[layer.name].nc1,
            quality=quality.value(layer.name),
        )
        for layer in wanted
    ]
    best = best_layer(measured, epsilon, pattern)
    if best is not None:
        measured = [replace(layer, quality_error=quality.error(layer.name, best.name)) for layer in measured]
    counted = train.examples, selection.examples
    return CollapseReport(
        tuple(measured), epsilon, settings.granularity, pattern, *counted, settings.seed, quality.measure
    )


def _rounds(
    backbone: Backbone,
    group: LayerGroup,
    train: ImageDataset,
    compute: Compute,
    sums: Mapping[str, ScatterSums],
    label: str,
) -> Iterator[Round]:
    """Yield the rounds of a group with their class means, each after a pass over the training images into ``sums``."""
    shard, step = compute.reducer.shard(train), feature_step(backbone)
    for ranges in group.rounds:
        statistics = [ClassScatter(len(train.classes), part.stop - part.start, compute.device) for part in ranges]
        take = partial(columns_of, ranges=ranges)
        add_statistics(statistics, shard, compute, f"{label}: class statistics", step, take)
        for part, scatter in zip(ranges, statistics, strict=True):
            of_layer = sums[part.layer.name]
            of_layer.add(scatter)
            if not math.isfinite(of_layer.within + of_layer.between):
                raise FitError(
                    f"expected finite features, layer {part.layer.name} gives NaN or infinity on {train.name}; "
                    "check the weights and the preprocessing"
                )
        yield ranges, [scatter.means for scatter in statistics]
