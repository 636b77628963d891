"""Fit the projection of the candidate layer(s): moments, Tucker factors, sizes, second scaling.

Two passes over the training images: one for channel means and covariances, then one, class by class, that
accumulates the class statistics of both the scaled layer and its largest projection; and one over the validation
images that counts nearest-class-mean hits for every size at once.  Where the class means of the scaled layer do
not fit the memory budget, the last two are repeated for ranges of its columns, over which scatter and distances
add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset, by_class
from psc_core.errors import FitError, UsageError
from psc_core.network.backbone import Backbone, FeatureStep, feature_step
from psc_core.numerics.scatter import (
    MIN_COLUMNS,
    Centroids,
    ClassScatter,
    between_scatter,
    class_pairs,
    nc1_from_scatter,
)
from psc_core.projection.fit.moments import channel_moments
from psc_core.projection.fit.ranks import RankChoice, choose_ranks, nc1_prefixes, nearest_mean_hits
from psc_core.projection.fit.tucker import tucker_factors
from psc_core.projection.module import Projection, reshape_features

MAX_CHANNEL_COMPONENTS = 64
MAX_COMPONENTS = 2048
"""Largest projection that is measured: components of the channel mode, and of both modes together."""


@dataclass(frozen=True)
class ProjectionReport:
    """What fitting a projection measured.

    Attributes:
        choice: The chosen sizes with NC1 and NC4 of the projected features.
        scaled_nc1: NC1 of the scaled, unprojected layer.
        scaled_nc4: NC4 of the scaled, unprojected layer.
        nc1: ``float64 (c_max, d_max)`` NC1 of every size.
        nc4: ``float64 (c_max, d_max)`` NC4 of every size.
        pooled: Sentence on spatial pooling, empty when there was none.
    """

    choice: RankChoice
    scaled_nc1: float
    scaled_nc4: float
    nc1: Tensor
    nc4: Tensor
    pooled: str

    def summary(self, raw_nc4: float) -> str:
        """What was chosen, next to the raw and the scaled layer, for the terminal."""
        choice = self.choice
        lines = [
            f"projection {choice.c_proj} × {choice.d_proj}: NC1 {choice.nc1:.3f} (scaled layer "
            f"{self.scaled_nc1:.3f}), NC4 {choice.nc4:.4f} (scaled layer {self.scaled_nc4:.4f}, raw {raw_nc4:.4f})"
        ]
        lines += [f"note: {text}" for text in (self.pooled, choice.warning) if text]
        return "\n".join(lines)


def fit_tucker(
    backbone: Backbone,
    train: ImageDataset,
    choose: ImageDataset,
    compute: Compute,
    *,
    epsilon: float,
    c_proj: int | None,
    d_proj: int | None,
    minimum_dim: int,
    second_scaling: bool,
    max_memory_bytes: int,
    reducer: Reducer,
) -> tuple[Projection, ProjectionReport]:
    """Fit and size the projection; see the module docstring.

    Args:
        backbone: Network cut behind the candidate layer(s).
        train: Training images.
        choose: Validation images that sizes are chosen on.
        compute: Device, precision and batch size.
        epsilon: Collapse cut-off.
        c_proj: Channel components, or None to choose.
        d_proj: Spatial components, or None to choose.
        minimum_dim: Smallest c·d considered when choosing.
        second_scaling: Whether z is standardised again.
        max_memory_bytes: Budget of the covariance tensor (its correlation takes as much again), and of the class
            means of the scaled layer.
        reducer: Sums over processes.

    Raises:
        FitError: ``c_proj`` is more than the layer, or what is measured of it, has.
    """
    step = feature_step(backbone, compute.precision)
    shapes = _feature_shapes(train, compute, step)
    if all(d == 1 for _, d in shapes):
        shapes = [(1, c) for c, _ in shapes]  # as reshape_features lays out vectors
    positions = [pooled_positions(c, d, max_memory_bytes // len(shapes) ** 2) for c, d in shapes]
    have = [d for _, d in shapes]
    pooled = (
        ""
        if positions == have
        else (
            f"positions {have} → {positions} by average pooling, to keep the covariance within "
            f"{max_memory_bytes >> 20} MiB"
        )
    )
    c_max, d_max = _largest(shapes[0][0], sum(positions), c_proj, d_proj)
    shard = reducer.shard(train)

    def features_of_rows() -> Iterator[Tensor]:
        for features, batch in passes(shard, compute, "moments", step):
            yield batch.per_example(reshape_features(features, positions)).float()

    moments = channel_moments(features_of_rows(), all_reduce=reducer.sum_)
    a, b = tucker_factors(moments.correlation(), c_max, d_max)
    c_max, d_max = a.shape[1], b.shape[1]
    zeros, ones = torch.zeros(c_max * d_max), torch.ones(c_max * d_max)
    largest = Projection(positions, moments.mean, moments.std(), a, b, zeros, ones).to(compute.device)

    del moments
    sized = _measure_sizes(largest, shard, choose, compute, step, max_memory_bytes, reducer)
    choice = choose_ranks(
        sized.nc1,
        sized.nc4,
        epsilon=epsilon,
        reference_nc4=sized.scaled_nc4,
        c_proj=c_proj,
        d_proj=d_proj,
        minimum=minimum_dim,
    )
    if second_scaling:
        largest = largest.with_second_scaling(*sized.block.mean_and_std())
    projection = largest.leading(choice.c_proj, choice.d_proj).cpu()
    return projection, ProjectionReport(
        choice, sized.scaled_nc1, sized.scaled_nc4, sized.nc1.cpu(), sized.nc4.cpu(), pooled
    )


def pooled_positions(channels: int, positions: int, budget_bytes: int) -> int:
    """Number of positions d′ kept of a layer, so that its C·d′² float64 covariance fits ``budget_bytes``.

    Halved as often as needed: a square map along both sides, else along its one.
    """
    side = round(positions**0.5)
    square = side * side == positions
    while channels * positions**2 * 8 > budget_bytes and positions > 1:
        side //= 2
        positions = side * side if square else positions // 2
    return positions


def _largest(channels: int, d: int, c_proj: int | None, d_proj: int | None) -> tuple[int, int]:
    """Sizes of the largest projection that is measured: what is asked for, else what the limits above allow."""
    c_max = min(channels, max(c_proj or 0, MAX_CHANNEL_COMPONENTS))
    d_max = min(d, max(d_proj or 0, MAX_COMPONENTS // c_max, 1))
    here, ever = (min(channels, n * (n + 1) // 2) for n in (d_max, d))  # see tucker_factors
    if c_proj and c_proj > ever:
        raise FitError(f"expected c_proj in 1…{ever} for this layer, got {c_proj}; give a smaller one or auto")
    if c_proj and c_proj > here:
        needed = next(n for n in range(d_max, d + 1) if n * (n + 1) // 2 >= c_proj)
        raise FitError(
            f"expected c_proj in 1…{here} beside {d_max} spatial components, got {c_proj}; give d_proj too, at "
            f"least {needed}, or a smaller c_proj"
        )
    return c_max, d_max


def _feature_shapes(train: ImageDataset, compute: Compute, step: FeatureStep) -> list[tuple[int, int]]:
    """(channels, positions) of each candidate layer, from one image."""
    probe = train.subset(torch.arange(1))
    for features, _ in passes(probe, compute, "probe", step):
        return [(f.shape[1], f.shape[2]) for f in features]
    raise UsageError("expected at least one training image")


@dataclass(frozen=True)
class _Sized:
    """NC1 and NC4 of the scaled layer and of every projection size, and the statistics of the largest."""

    scaled_nc1: float
    scaled_nc4: float
    nc1: Tensor
    nc4: Tensor
    block: ClassScatter


def _measure_sizes(
    largest: Projection,
    train: ImageDataset,
    choose: ImageDataset,
    compute: Compute,
    step: FeatureStep,
    max_memory_bytes: int,
    reducer: Reducer,
) -> _Sized:
    """Both passes, once for each range of the scaled layer's columns that fits the memory budget."""
    classes, device = len(train.classes), compute.device
    c_max, d_max = largest.c_proj, largest.d_proj
    width = largest.mean.numel()
    columns_at_once = min(width, max(MIN_COLUMNS, max_memory_bytes // (8 * classes)))
    ranges = [slice(start, min(width, start + columns_at_once)) for start in range(0, width, columns_at_once)]
    block = ClassScatter(classes, c_max * d_max, device, by_column=True)
    hits = torch.zeros(c_max, d_max, dtype=torch.int64, device=device)
    scaled_hits = torch.zeros((), dtype=torch.int64, device=device)
    within = between = level = 0.0
    order = by_class(train)
    scores = torch.zeros(len(choose) if len(ranges) > 1 else 0, classes, dtype=torch.float64)
    for columns in ranges:
        first, last = columns.start == 0, columns.stop == width
        scaled = ClassScatter(classes, columns.stop - columns.start, device)
        for features, batch in passes(train, compute, "class statistics", step, order=order):
            rows = class_pairs(batch.labels, batch.image_index, device)
            x = largest.scaled(features)
            scaled.add(x.flatten(1)[:, columns], rows)
            if first:
                block.add(((largest.channel_factor.T @ x) @ largest.spatial_factor).flatten(1), rows)
        scaled.all_reduce(reducer.sum_)
        if first:
            block.all_reduce(reducer.sum_)
            means = block.means.view(-1, c_max, d_max)
        parts = between_scatter(scaled.means, scaled.counts)
        within, between, level = within + float(scaled.within), between + float(parts[0]), level + float(parts[1])
        centroids = Centroids(scaled.means)
        seen = 0
        for features, batch in passes(choose, compute, "sizes", step):
            labels, image_index = batch.labels.to(device), batch.image_index.to(device)
            x = largest.scaled(features)
            here = centroids.scores(x.flatten(1)[:, columns])
            if len(ranges) > 1:
                at = slice(seen, seen := seen + len(here))
                here = scores[at].add_(here.cpu()).to(device)
            if last:
                scaled_hits += (here.argmin(1)[image_index] == labels).sum()
            if first:
                z = (largest.channel_factor.T @ x) @ largest.spatial_factor
                hits += nearest_mean_hits(batch.per_example(z), means, labels)
    nc1 = nc1_prefixes(block.within.view(c_max, d_max), block.total().view(c_max, d_max))
    scaled_nc4 = int(scaled_hits) / choose.examples
    return _Sized(nc1_from_scatter(within, between, level), scaled_nc4, nc1, hits.double() / choose.examples, block)
