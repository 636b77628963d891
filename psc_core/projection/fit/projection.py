"""Fit the largest projection of the candidate layer(s) that is considered, and measure every smaller size of it.

The input is the network, cut behind the candidate, and the images; the output is a :class:`SizedProjection` with A
(C, c_max), B (d, d_max), and NC1 and NC4 (c_max, d_max) of every leading block.  One pass over the training images
gives channel means and covariances (:mod:`.moments`), whose correlation is decomposed (:mod:`.tucker`); further passes
measure every size (:mod:`.sizes`), and :mod:`.ranks` chooses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.compute.allocator import release_freed_memory
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError
from psc_core.network.backbone import Backbone, feature_step, trial_input
from psc_core.projection.fit.moments import channel_moments
from psc_core.projection.fit.sizes import measure_sizes
from psc_core.projection.fit.tucker import tucker_factors
from psc_core.projection.module import Projection, reshape_features
from psc_core.settings import FitSettings

MAX_CHANNEL_COMPONENTS = 64
MAX_COMPONENTS = 2048
"""Largest projection that is measured: components of the channel mode, and of both modes together."""


@dataclass(frozen=True)
class SizedProjection:
    """The largest projection, on the device, and the measurements of its sizes."""

    largest: Projection
    scaled_nc1: float  # of the scaled, unprojected layer
    scaled_nc4: float
    nc1: Float[Tensor, "c_max d_max"]  # of every size, float64
    nc4: Float[Tensor, "c_max d_max"]
    deviation: Float[Tensor, "c_max d_max"]  # standard deviation of every component of Z, float64
    note: str  # to how many positions the layers were reduced; empty when they were not


def fit_tucker(
    backbone: Backbone,
    train: ImageDataset,
    selection: ImageDataset,
    settings: FitSettings,
    compute: Compute,
) -> SizedProjection:
    """Fit the largest projection and measure its sizes.

    Args:
        backbone: The network, cut behind the candidate layer(s).
        train: Training images.
        selection: Validation images that NC4 is measured on.
        settings: The sizes, where they are given, and whether z is standardised.
        compute: Device, batch size, processes, and the memory for the covariance tensor, whose correlation takes as
            much again, and for the class means of the scaled layer.

    Raises:
        FitError: If ``c_proj`` or ``d_proj`` is larger than the layer, or the part of it that is measured, allows.
    """
    c_proj = settings.c_proj
    step = feature_step(backbone, compute.precision)
    with torch.inference_mode():
        features = backbone(trial_input(train.preprocess).to(compute.device))[0]
    shapes = [(layer.shape[1], layer.shape[2]) for layer in features]
    if all(d == 1 for _, d in shapes):
        shapes = [(1, c) for c, _ in shapes]  # as reshape_features lays out vectors
    positions = [reduced_positions(c, d, compute.max_memory // len(shapes) ** 2) for c, d in shapes]
    have = [d for _, d in shapes]
    note = ""
    if positions != have:
        budget = f"{compute.max_memory >> 20} MiB"
        note = f"positions {have} → {positions} by average pooling, to keep the covariance within {budget}"
    c_max, d_max = largest_sizes(shapes[0][0], sum(positions), c_proj, settings.d_proj)
    shard = compute.reducer.shard(train)

    def features_of_examples() -> Iterator[Tensor]:
        for features, batch in passes(shard, compute, "moments", step):
            yield batch.per_example(reshape_features(features, positions)).float()

    moments = channel_moments(features_of_examples(), all_reduce=compute.reducer.sum_)
    mean, std, correlation = moments.mean, moments.std(), moments.correlation()
    del moments  # The covariance is as large as the budget allows, and so is what the decomposition needs besides.
    release_freed_memory()
    a, b = tucker_factors(correlation, c_max, d_max)
    del correlation
    c_max, d_max = a.shape[1], b.shape[1]
    if c_proj and c_proj > c_max:
        raise FitError(
            f"expected c_proj in 1…{c_max}, for the channels of this layer vary in no more ways, got {c_proj}; give a "
            "smaller one or auto"
        )
    zeros, ones = torch.zeros(c_max * d_max), torch.ones(c_max * d_max)
    largest = Projection.from_moments(positions, mean, std, a, b, zeros, ones).to(compute.device)
    sized = measure_sizes(largest, shard, selection, compute, step)
    z_mean, z_std = sized.block.mean_and_std()
    if not settings.no_second_scaling:
        largest = largest.with_second_scaling(z_mean, z_std)
    nc1, nc4, deviation = sized.nc1.cpu(), sized.nc4.cpu(), z_std.view(c_max, d_max).cpu()
    return SizedProjection(largest, sized.scaled_nc1, sized.scaled_nc4, nc1, nc4, deviation, note)


def reduced_positions(channels: int, positions: int, budget_bytes: int) -> int:
    """Return the number of positions d′ to keep of a layer, so that its covariance, C·d′² float64, fits the budget.

    The sides of a square map are halved as often as needed, else the number of positions.
    """
    side = round(positions**0.5)
    square = side * side == positions
    while channels * positions**2 * 8 > budget_bytes and positions > 1:
        side //= 2
        positions = side * side if square else positions // 2
    return positions


def largest_sizes(channels: int, d: int, c_proj: int | None, d_proj: int | None) -> tuple[int, int]:
    """Return (c_max, d_max) of the largest projection to measure: the given sizes, else what the limits above allow."""
    c_max = min(channels, max(c_proj or 0, MAX_CHANNEL_COMPONENTS))
    d_max = min(d, max(d_proj or 0, MAX_COMPONENTS // c_max, 1))
    here, ever = (min(channels, n * (n + 1) // 2) for n in (d_max, d))  # see tucker_factors
    for name, value, limit in (("c_proj", c_proj, ever), ("d_proj", d_proj, d)):
        if value is not None and not 1 <= value <= limit:
            raise FitError(f"expected {name} in 1…{limit} for this layer, got {value}; give a smaller one or auto")
    if c_proj and c_proj > here:
        needed = next(n for n in range(d_max, d + 1) if n * (n + 1) // 2 >= c_proj)
        raise FitError(
            f"expected c_proj in 1…{here} beside {d_max} spatial components, got {c_proj}; give d_proj too, at "
            f"least {needed}, or a smaller c_proj"
        )
    return c_max, d_max
