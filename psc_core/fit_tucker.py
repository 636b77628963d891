"""Fit the projection of the candidate layer(s): moments, Tucker factors, sizes, second scaling.

Four passes over the training images: channel means, channel covariances, then one that accumulates the class
statistics of both the scaled layer and its largest projection; and one over the validation images that
counts nearest-class-mean hits for every size at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.backbone import Backbone
from psc_core.candidate import Candidate
from psc_core.data import ImageDataset
from psc_core.distributed import Reducer
from psc_core.errors import UsageError
from psc_core.moments import channel_moments
from psc_core.passes import Compute, FeatureStep, feature_step, passes
from psc_core.projection import Projection, pooled_positions, reshape_features
from psc_core.ranks import ClassScatter, RankChoice, choose_ranks, nc1_prefixes, nearest_mean_hits
from psc_core.tucker import tucker_factors

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
    candidate: Candidate,
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
        backbone: Network cut behind ``candidate.layers``.
        candidate: The candidate layer(s).
        train: Training images.
        choose: Validation images that sizes are chosen on.
        compute: Device, precision and batch size.
        epsilon: Collapse cut-off.
        c_proj: Channel components, or None to choose.
        d_proj: Spatial components, or None to choose.
        minimum_dim: Smallest c·d considered when choosing.
        second_scaling: Whether z is standardised again.
        max_memory_bytes: Budget of the covariance tensor.
        reducer: Sums over processes.
    """
    step = feature_step(backbone)
    shapes = _feature_shapes(train, compute, step)
    positions = [
        pooled_positions(1 if d == 1 else c, c if d == 1 else d, max_memory_bytes // len(shapes) ** 2)
        for c, d in shapes
    ]
    have = [c if d == 1 else d for c, d in shapes]
    pooled = (
        ""
        if positions == have
        else (
            f"positions {have} → {positions} by average pooling, to keep the covariance within "
            f"{max_memory_bytes >> 20} MiB"
        )
    )
    shard = reducer.shard(train)

    def rows(what: str) -> Iterator[Tensor]:
        for features, batch in passes(shard, compute, what, step):
            yield batch.rows(reshape_features(features, positions)).float()

    names = iter(("moments 1/2: means", "moments 2/2: covariances"))
    moments = channel_moments(lambda: rows(next(names)), all_reduce=reducer.sum_)
    channels, d = moments.mean.shape
    c_max = min(channels, max(c_proj or 0, MAX_CHANNEL_COMPONENTS))
    d_max = min(d, max(d_proj or 0, MAX_COMPONENTS // c_max))
    a, b = tucker_factors(moments.correlation(), c_max, d_max)
    c_max, d_max = a.shape[1], b.shape[1]
    zeros, ones = torch.zeros(c_max * d_max), torch.ones(c_max * d_max)
    largest = Projection(positions, moments.mean, moments.std(), a, b, zeros, ones).to(compute.device)

    num_classes = len(train.classes)
    scaled = ClassScatter(num_classes, channels * d, compute.device)
    block = ClassScatter(num_classes, c_max * d_max, compute.device)
    for features, batch in passes(shard, compute, "class statistics", step):
        labels = batch.labels.to(compute.device)
        x = largest.scaled(features)
        z = (largest.channel_factor.T @ x) @ largest.spatial_factor
        scaled.add(batch.rows(x.flatten(1)), labels)
        block.add(batch.rows(z.flatten(1)), labels)
    scaled.all_reduce(reducer.sum_)
    block.all_reduce(reducer.sum_)

    nc1 = nc1_prefixes(block.within.view(c_max, d_max), block.total().view(c_max, d_max))
    nc4, scaled_nc4 = _nearest_mean(largest, scaled, block, choose, compute, step)
    scaled_nc1 = float(scaled.within.sum() / scaled.total().sum())
    choice = choose_ranks(
        nc1, nc4, epsilon=epsilon, reference_nc4=scaled_nc4, c_proj=c_proj, d_proj=d_proj, minimum=minimum_dim
    )
    if second_scaling:
        mean, std = block.mean_and_std()
        largest = largest.with_second_scaling(mean, std)
    projection = largest.leading(choice.c_proj, choice.d_proj).cpu()
    return projection, ProjectionReport(choice, scaled_nc1, scaled_nc4, nc1.cpu(), nc4.cpu(), pooled)


def _feature_shapes(train: ImageDataset, compute: Compute, step: FeatureStep) -> list[tuple[int, int]]:
    """(channels, positions) of each candidate layer, from one image."""
    probe = train.subset(torch.arange(1))
    for features, _ in passes(probe, compute, "probe", step):
        return [(f.shape[1], f.shape[2]) for f in features]
    raise UsageError("expected at least one training image")


def _nearest_mean(
    largest: Projection,
    scaled: ClassScatter,
    block: ClassScatter,
    choose: ImageDataset,
    compute: Compute,
    step: FeatureStep,
) -> tuple[Tensor, float]:
    """NC4 of every projection size and of the scaled layer, in one pass over ``choose``."""
    c_max, d_max = largest.c_proj, largest.d_proj
    means = block.means.view(-1, c_max, d_max)
    centre = scaled.means.mean(0)
    centred_means = scaled.means - centre
    offsets = centred_means.square().sum(1)
    hits = torch.zeros(c_max, d_max, dtype=torch.int64, device=compute.device)
    scaled_hits, count = 0, 0
    for features, batch in passes(choose, compute, "sizes", step):
        labels = batch.labels.to(compute.device)
        x = largest.scaled(features)
        z = (largest.channel_factor.T @ x) @ largest.spatial_factor
        hits += nearest_mean_hits(batch.rows(z), means, labels)
        nearest = (offsets - 2 * (x.flatten(1).double() - centre) @ centred_means.T).argmin(1)
        scaled_hits += int((batch.rows(nearest) == labels).sum())
        count += len(labels)
    return hits.double() / count, scaled_hits / count
