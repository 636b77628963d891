"""Project features of the chosen layer(s) to the feature vector z (paper, Algorithm 1, appendix A.2).

    X  (B, C, d)      channels × positions of all chosen layers, concatenated along positions
    X ← (X − μ) / σ    channelwise moments, the standard deviation in both of the paper's formulas
    Z  = Aᵀ X B        (B, c_proj, d_proj)
    z ← (vec Z − μ_Z) / σ_Z      second scaling, optional

The paper divides by the *variance* in ``scale`` but normalises the covariance by the standard deviation.  Here it is
the standard deviation in both: else Z would not have the correlation tensor that was decomposed.
A fully connected layer has d = 1 and no spatial mode to reduce, so it is read as one channel with C positions: the
decomposition is then the eigendecomposition of its correlation matrix.

It is fitted in three steps.  One pass over the training images gives the mean and covariance of every channel (paper,
Algorithm 2, appendix A.2.2); covariance between channels is never formed.  Standard deviations are clamped to at least
:data:`.DEAD_UNIT` of their root mean square over the layer, so that a unit silent on the training data cannot dominate
after scaling.  The correlation tensor is decomposed into Tucker factors (section 4.2 and appendix A.2.1),

    R ≈ G ×₁ A ×₂ B ×₃ B        R (C, d, d), A (C, c_max), B (d, d_max)

R is symmetric in its last two modes, so one spatial factor serves both.  The diagonal of each slice is one, so that the
slices span at most d (d − 1) / 2 + 1 dimensions; a column of A beyond what they do span would be rounding alone.

Then one pass over the training images, class by class, and one over the selection split measure the scaled layer X
(B, C · d) and every size of the projection, whose leading block Z[:, :c, :d'] a smaller one keeps:

    NC1(c, d) = Σ_{i<c, j<d} w_ij / Σ_{i<c, j<d} t_ij
    NC4(c, d) = accuracy of  argmin_k Σ_{i<c, j<d} (z_ij − μ_kij)²

where w and t are the within-class and total scatter of one coordinate (:mod:`psc_core.linalg`): two
cumulative sums replace the sweep.  Where the class means of the scaled layer do not fit the memory budget, both passes
are repeated for ranges of its columns, over which scatter and distances add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from psc_core import linalg
from psc_core.allocator import release_freed_memory
from psc_core.compute import Compute, add_statistics, distances_to_means, passes
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError
from psc_core.features import KeptFeatures, KeptLayers, chunk_rows
from psc_core.fitted import Fitted, restore
from psc_core.linalg import (
    DEAD_UNIT,
    MIN_COLUMNS,
    ClassScatter,
    Moments,
    MomentSums,
    nc1_of,
    rounding_of,
    scatter_sums,
    sizes_of,
)
from psc_core.network.cut import Backbone, FeatureStep, feature_step, trial_input
from psc_core.settings import FitSettings


class Projection(Fitted):
    """The projection: reshape, scale, project, scale again; without the second scaling μ_Z and 1/σ_Z are 0 and 1.

    Each chosen layer is reduced to a number of ``positions``, by average pooling where it has more.
    """

    kind = "tucker"
    layout: ClassVar = {
        "mean": ("channels", "positions"),
        "inverse_std": ("channels", "positions"),
        "channel_factor": ("channels", "c_proj"),
        "spatial_factor": ("positions", "d_proj"),
        "z_mean": ("dim",),
        "z_inverse_std": ("dim",),
    }

    def __init__(self, tensors: Mapping[str, Tensor], *, positions: Sequence[int]) -> None:
        super().__init__(tensors, record={})
        self.positions = tuple(positions)
        # −μ / σ of both scalings, with which each is one operation.
        for name, mean, scale in (("shift", self.mean, self.inverse_std), ("z_shift", self.z_mean, self.z_inverse_std)):
            self.register_buffer(name, (-mean.double() * scale.double()).float(), persistent=False)

    @classmethod
    def from_moments(
        cls,
        positions: Sequence[int],
        mean: Float[Tensor, "channels positions"],
        std: Float[Tensor, "channels positions"],
        channel_factor: Float[Tensor, "channels c_proj"],
        spatial_factor: Float[Tensor, "positions d_proj"],
        z_mean: Float[Tensor, " dim"],
        z_std: Float[Tensor, " dim"],
    ) -> Projection:
        """Return the projection of μ, σ, A, B, μ_Z and σ_Z; both σ are positive."""
        scales = {"mean": mean, "inverse_std": 1.0 / std, "z_mean": z_mean, "z_inverse_std": 1.0 / z_std}
        factors = {"channel_factor": channel_factor, "spatial_factor": spatial_factor}
        return cls({**scales, **factors}, positions=positions)

    @property
    def c_proj(self) -> int:
        return self.channel_factor.shape[1]

    @property
    def d_proj(self) -> int:
        return self.spatial_factor.shape[1]

    def scaled(self, features: Sequence[Tensor]) -> Float[Tensor, "batch channels positions"]:
        """Return X after the first scaling, from the canonical features (B, C, d_l) of each layer l."""
        return torch.addcmul(self.shift, reshape_features(features, self.positions).float(), self.inverse_std)

    def project(self, x: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch c_proj d_proj"]:
        """Return Z before the second scaling, from scaled X."""
        return (self.channel_factor.T @ x) @ self.spatial_factor

    def forward(self, features: Sequence[Tensor]) -> Float[Tensor, "batch dim"]:
        """Return z (B, c_proj · d_proj), row-major over (channel, spatial) components."""
        return torch.addcmul(self.z_shift, self.project(self.scaled(features)).flatten(1), self.z_inverse_std)

    def leading(self, c_proj: int, d_proj: int) -> Projection:
        """Return this projection with only its leading components."""
        both = (self.z_mean, 1.0 / self.z_inverse_std)
        scaling = (part.view(self.c_proj, self.d_proj)[:c_proj, :d_proj].flatten() for part in both)
        factors = self.channel_factor[:, :c_proj], self.spatial_factor[:, :d_proj]
        return Projection.from_moments(self.positions, self.mean, 1.0 / self.inverse_std, *factors, *scaling)

    def with_second_scaling(self, z_mean: Tensor, z_std: Tensor) -> Projection:
        """Return this projection with (vec Z − z_mean) / z_std as its last step."""
        factors = self.channel_factor, self.spatial_factor
        return Projection.from_moments(self.positions, self.mean, 1.0 / self.inverse_std, *factors, z_mean, z_std)

    def config(self) -> dict[str, Any]:
        """Return method and sizes, JSON types; the tensors are in ``state_dict()``."""
        sizes = {name: self.sizes[name] for name in ("channels", "c_proj", "d_proj")}
        return {"method": self.kind, "positions": list(self.positions), **sizes}

    @classmethod
    def restore(cls, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Projection:
        """Return the projection with this :meth:`config` and ``state_dict()``; raises :class:`BundleError`."""
        positions = config["positions"]
        sizes = {name: config[name] for name in ("channels", "c_proj", "d_proj")}
        sizes |= {"positions": sum(positions), "dim": sizes["c_proj"] * sizes["d_proj"]}
        return restore({cls.kind: cls}, {"kind": config["method"], "sizes": sizes, "positions": positions}, state)


def reshape_features(features: Sequence[Tensor], positions: Sequence[int]) -> Float[Tensor, "batch channels positions"]:
    """Return X (B, C, d): the features (B, C, d_l) of each layer reduced to its positions, and concatenated."""
    if len({f.shape[1] for f in features}) > 1 and any(f.shape[2] > 1 for f in features):
        raise FitError(
            f"expected layers with equal numbers of channels, got {[f.shape[1] for f in features]}; choose one layer"
        )
    if all(f.shape[2] == 1 for f in features):
        features = [f.transpose(1, 2) for f in features]
    parts = [reduce_positions(f, n) for f, n in zip(features, positions, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def reduce_positions(
    features: Float[Tensor, "batch channels _"], positions: int
) -> Float[Tensor, "batch channels {positions}"]:
    """Return features averaged to this many positions: in squares if both numbers are squares, else along one axis."""
    batch, channels, have = features.shape
    if have == positions:
        return features
    side, kept = round(have**0.5), round(positions**0.5)
    if side * side == have and kept * kept == positions:
        maps = features.reshape(batch, channels, side, side)
        return F.adaptive_avg_pool2d(maps, kept).flatten(2)
    return F.adaptive_avg_pool1d(features, positions)


class ChannelMoments(Moments):
    """Mean (C, d) and covariance (C, d, d) of X over the labelled examples."""

    def std(self) -> Float[Tensor, "channels positions"]:
        """Return the standard deviations, at least :data:`.DEAD_UNIT` of their root mean square; ∞, which scales to 0,
        where that is no more than rounding.
        """
        std = self.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        scale = float(std.square().mean().sqrt())
        clamped = std.clamp_min(DEAD_UNIT * scale)
        varies = clamped > rounding_of(sizes_of(self.mean))
        if scale == 0.0 or not bool((varies & (std > 0)).any()):
            raise FitError(
                "every unit of the chosen layer is constant over the training images, up to rounding; choose "
                "another layer, or check the images, the weights and the running statistics of batch normalisation"
            )
        return torch.where(varies, clamped, math.inf)

    def correlation(self) -> Float[Tensor, "channels positions positions"]:
        """Return D⁻¹ Σ_c D⁻¹ with D = diag(std), the tensor that is decomposed; it is as large as the covariance."""
        std = self.std()
        return (self.covariance / std[:, :, None]).div_(std[:, None, :])


def channel_moments(
    batches: Iterable[Float[Tensor, "_ channels positions"]],
    *,
    all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> ChannelMoments:
    """Return mean and covariance of every channel, from one pass over features of any float type."""
    sums: MomentSums | None = None
    for features in batches:
        if sums is None:
            sums = MomentSums(features.shape[1], features.shape[2], features.device)
        sums.add(features)
    if sums is None:
        raise FitError("expected at least one training image, got none")
    moments = sums.finish(all_reduce)
    if not bool(moments.mean.isfinite().all()):
        raise FitError("the chosen layer's features are not finite; check the weights or use --precision fp32")
    return ChannelMoments(*moments)


ITERATIONS = 10  # at most, of higher-order orthogonal iteration, which starts near the end, from the truncated HOSVD
NO_RANK = 1e-12  # eigenvalue of a Gram matrix, relative to the largest, below which it is rounding


def tucker_factors(
    correlation: Float[Tensor, "channels positions positions"], c_max: int, d_max: int
) -> tuple[Float[Tensor, "channels c_max"], Float[Tensor, "positions d_max"]]:
    """Return the leading factors A and B of the channel and the spatial mode, by tensorly's HOOI in float64.

    There are at most C columns of A, at most d_max (d_max + 1) / 2, which is what symmetric slices span, and no more
    than these do span; at most d of B.
    """
    channels, positions, _ = correlation.shape
    d_max = min(d_max, positions)
    c_max = min(c_max, channels, d_max * (d_max + 1) // 2)
    if channels == 1:
        # One channel: the decomposition is the eigendecomposition of one symmetric matrix.
        values, vectors = torch.linalg.eigh(correlation[0].double().cpu())
        leading = vectors[:, values.abs().argsort(descending=True, stable=True)[:d_max]]
        return correlation.new_ones(1, 1).double(), linalg.fix_signs(leading).to(correlation.device)
    tensor = correlation.double().cpu()
    core, start = truncated_hosvd(tensor, c_max, d_max)
    import tensorly  # Imported here, so that a service does not load it.
    from tensorly.decomposition import tucker

    with tensorly.backend_context("pytorch", local_threadsafe=True):
        _, factors = tucker(tensor, rank=[*core.shape], n_iter_max=ITERATIONS, tol=1e-6, init=(core, start))
    a, b = (linalg.fix_signs(factor).to(correlation.device) for factor in factors[:2])
    return a, b


def truncated_hosvd(
    tensor: Float[Tensor, "channels positions positions"], c_max: int, d_max: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the start of the iterations: leading eigenvectors of each unfolding's Gram matrix."""
    # A Gram matrix is smaller than the unfolding, whose SVD would give the same vectors.
    channel = tensor.flatten(1) @ tensor.flatten(1).T
    spatial = torch.zeros_like(tensor[0])
    for part in tensor:
        spatial.addmm_(part, part)
    values, vectors = linalg.eigh(channel)
    rank = max(1, int((values > NO_RANK * values[0]).sum()))
    a, b = vectors[:, : min(c_max, rank)], linalg.eigh(spatial).vectors[:, :d_max]
    return tensor.new_zeros(a.shape[1], d_max, d_max), [a, b, b]


NC4_LOSS: Final = 0.01  # largest loss of NC4 that a smaller size may cost
MUCH_NC4: Final = 0.05  # A loss of NC4 that is more than noise: several of its standard errors


def nc1_prefixes(
    within: Float[Tensor, "c_max d_max"], total: Float[Tensor, "c_max d_max"]
) -> Float[Tensor, "c_max d_max"]:
    """Return NC1 of every leading block; entry [c − 1, d − 1] is that of (c, d)."""
    return within.cumsum(0).cumsum(1) / total.cumsum(0).cumsum(1).clamp_min(torch.finfo(torch.float64).tiny)


def nearest_mean_hits(
    z: Float[Tensor, "n c_max d_max"], means: Float[Tensor, "classes c_max d_max"], labels: Int[Tensor, " n"]
) -> Int[Tensor, "c_max d_max"]:
    """Return the number of labelled examples whose nearest class mean is right, for every leading block."""
    z, means = (part.double().permute(1, 2, 0).contiguous() for part in (z, means))
    hits = torch.zeros(z.shape[:2], dtype=torch.int64, device=z.device)
    for chunk in chunk_rows(len(labels), 8 * means[0].numel()):  # so few that the sums fit into a cache
        distances = torch.zeros((), dtype=torch.float64, device=z.device)
        for c, (of_image, of_class) in enumerate(zip(z[:, :, chunk], means, strict=True)):
            distances = (of_image[:, :, None] - of_class[:, None]).square_().cumsum(0).add_(distances)
            hits[c] += (distances.argmin(2) == labels[chunk]).sum(1)
    return hits


@dataclass(frozen=True)
class ProjectionReport:
    """The chosen size of a projection, and the measurements of every size that it was chosen from."""

    c_proj: int
    d_proj: int
    warning: str  # what a user should know about the choice; empty where nothing is wrong
    scaled_nc1: float  # of the scaled, unprojected layer
    scaled_nc4: float
    nc1: Float[Tensor, "c_max d_max"]  # of every size, float64
    nc4: Float[Tensor, "c_max d_max"]
    note: str = ""  # to how many positions the layers were reduced; empty when they were not
    positions: tuple[tuple[int, float], ...] = ()  # spatial components, the density's mean AUROC on synthetic images

    def of_size(self, d_proj: int | None = None) -> tuple[float, float]:
        """Return NC1 and NC4 of z, with the chosen or another number of spatial components."""
        at = self.c_proj - 1, (d_proj or self.d_proj) - 1
        return float(self.nc1[at]), float(self.nc4[at])

    def more_positions(self, deviation: Float[Tensor, "c_max d_max"], epsilon: float) -> list[int]:
        """Return the chosen number of spatial components, and two, four, … times it that keep NC1 > ε and the NC4.

        None of their components deviates by less than :data:`.DEAD_UNIT` of the root mean square: the second scaling
        would raise its rounding errors.
        """
        found = [self.d_proj]
        floor = DEAD_UNIT * deviation.square().mean().sqrt()
        d_proj = 2 * self.d_proj
        while d_proj < 2 * self.nc1.shape[1]:
            tried = min(d_proj, self.nc1.shape[1])
            nc1, nc4 = self.of_size(tried)
            keeps = nc1 > epsilon and nc4 >= self.of_size()[1] - NC4_LOSS
            if keeps and deviation[: self.c_proj, :tried].min() >= floor:
                found.append(tried)
            d_proj *= 2
        return found

    def summary(self, raw_nc4: float | None) -> str:
        """Return lines for the terminal: the choice, the scaled layer, and the raw one where its NC4 is known."""
        (nc1, nc4), raw = self.of_size(), "" if raw_nc4 is None else f", raw {raw_nc4:.4f}"
        lines = [
            f"projection {self.c_proj} × {self.d_proj}: NC1 {nc1:.3f} (scaled layer {self.scaled_nc1:.3f}), "
            f"NC4 {nc4:.4f} (scaled layer {self.scaled_nc4:.4f}{raw})"
        ]
        if self.positions:
            found = ", ".join(f"{d} {value:.4f}" for d, value in self.positions)
            lines.append(f"density on synthetic OOD images by spatial components (mean AUROC): {found}")
        lines += [f"note: {text}" for text in (self.note, self.warning) if text]
        return "\n".join(lines)


def choose_ranks(
    nc1: Float[Tensor, "c_max d_max"], nc4: Float[Tensor, "c_max d_max"], reference_nc4: float, settings: FitSettings
) -> tuple[int, int, str]:
    """Return the smallest c·d with NC1 > ε and NC4 ≥ ``reference_nc4`` − :data:`NC4_LOSS`, on a tie by NC4.

    Where no size satisfies both, the one with the best NC4 among those with NC1 > ε (or among all) is taken; but where
    that gives up :data:`MUCH_NC4` of what collapsed sizes keep, the smallest that keeps it.  The warning beside c and d
    says so.  ``reference_nc4`` is that of the scaled, unprojected layer; ``settings`` may fix c or d, and have the
    smallest c·d that is considered, or the largest there is where that is smaller.
    """
    epsilon, c_proj, d_proj = settings.epsilon, settings.c_proj, settings.d_proj
    c_max, d_max = nc1.shape
    c, d = torch.arange(1, c_max + 1)[:, None], torch.arange(1, d_max + 1)
    size = (c * d).double()
    nc1, nc4 = nc1.cpu().double(), nc4.cpu().double()
    allowed = torch.ones_like(nc1, dtype=torch.bool)
    if c_proj is not None:
        allowed &= c == c_proj
    if d_proj is not None:
        allowed &= d == d_proj
    allowed &= size >= min(settings.minimum_dim, int(size[allowed].max()))
    uncollapsed = allowed & (nc1 > epsilon)
    kept = uncollapsed & (nc4 >= reference_nc4 - NC4_LOSS)
    found = []
    cost = size - nc4  # NC4 ≤ 1 only breaks ties between equal sizes
    if bool(kept.any()):
        pick = int(torch.where(kept, cost, torch.inf).argmin())
    else:
        eligible = uncollapsed if bool(uncollapsed.any()) else allowed
        pick = int(torch.where(eligible, nc4 - 1e-9 * size, -torch.inf).argmax())
        above, most = float(nc4.view(-1)[pick]), min(reference_nc4, float(nc4[allowed].max()))
        taken = "the best NC4"
        if most - above > MUCH_NC4:
            pick = int(torch.where(allowed & (nc4 >= most - NC4_LOSS), cost, torch.inf).argmin())
            taken = f"a collapsed one, NC1 > {epsilon} gives up {reference_nc4 - above:.3f} of NC4"
        if c_proj is None or d_proj is None:
            found.append(
                f"no projection of at most {c_max}×{d_max} keeps NC1 > {epsilon} and NC4 within {NC4_LOSS} "
                f"of {reference_nc4:.3f}: took {taken}"
            )
    row, column = divmod(pick, d_max)
    lost = reference_nc4 - float(nc4[row, column])
    if lost > MUCH_NC4:
        found.append(f"the projection gives up {lost:.3f} of NC4: {_remedy(nc1, nc4, reference_nc4, lost)}")
    return row + 1, column + 1, "; ".join(found)


def _remedy(nc1: Tensor, nc4: Tensor, reference_nc4: float, lost: float) -> str:
    """Return the flags that keep more of NC4 than a choice that loses ``lost`` of it."""
    size = torch.arange(1, nc1.shape[0] + 1)[:, None] * torch.arange(1, nc1.shape[1] + 1)
    enough = nc4 >= min(reference_nc4, float(nc4.max())) - NC4_LOSS
    row, column = divmod(int(torch.where(enough, size, torch.inf).argmin()), nc1.shape[1])
    left = max(0.0, reference_nc4 - float(nc4[row, column]))
    if lost - left <= NC4_LOSS:
        return "no size keeps more; choose another layer of the table by --layer"
    return (
        f"--c-proj {row + 1} --d-proj {column + 1} give up {left:.3f}, with NC1 {float(nc1[row, column]):.3f}, "
        "and --layer reads another layer"
    )


def measure_sizes(
    largest: Projection,
    train: ImageDataset,
    selection: ImageDataset,
    compute: Compute,
    step: FeatureStep,
    *,
    kept: KeptLayers | None = None,
) -> tuple[tuple[float, float], Tensor, Tensor, ClassScatter]:
    """Return NC1 and NC4 of the scaled layer, both of every size, and the class statistics of the largest.

    Both passes are made for each range of columns whose class means fit ``compute.max_memory``.  ``largest`` is without
    second scaling, on the device; ``train`` is this process's shard; ``step`` gives the features of the chosen layer,
    ``kept`` those of training images, if there was room.
    """
    classes, device = len(train.classes), compute.device
    c_max, d_max = largest.c_proj, largest.d_proj
    width = largest.mean.numel()
    columns_at_once = min(width, max(MIN_COLUMNS, compute.device_memory // (8 * classes)))
    ranges = [slice(start, min(width, start + columns_at_once)) for start in range(0, width, columns_at_once)]
    block = ClassScatter(classes, c_max * d_max, device, by_column=True)
    hits = torch.zeros(c_max, d_max, dtype=torch.int64, device=device)
    scaled_hits = torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.zeros(3, dtype=torch.float64)
    distances = torch.zeros(len(selection) if len(ranges) > 1 else 0, classes, dtype=torch.float64)
    for number, columns in enumerate(ranges):
        is_first = number == 0
        take = partial(_columns, largest=largest, columns=columns, is_first=is_first)
        scaled = ClassScatter(classes, columns.stop - columns.start, device)
        statistics = [scaled, block] if is_first else [scaled]
        add_statistics(statistics, train, compute, "class statistics", step, take, kept=kept)
        sums += scatter_sums(scaled)
        seen = 0
        for batch, found, (here,) in distances_to_means([scaled.means], selection, compute, "sizes", step, take):
            labels, image_index = batch.labels.to(device), batch.image_index.to(device)
            if len(ranges) > 1:
                at = slice(seen, seen := seen + len(here))
                here = distances[at].add_(here.cpu()).to(device)
            if columns.stop == width:
                scaled_hits += (here.argmin(1)[image_index] == labels).sum()
            if is_first:
                z, means = (part.view(-1, c_max, d_max) for part in (batch.per_example(found[1]), block.means))
                hits += nearest_mean_hits(z, means, labels)
    nc1 = nc1_prefixes(block.within.view(c_max, d_max), block.total().view(c_max, d_max))
    of_scaled = nc1_of(sums), int(scaled_hits) / selection.examples
    return of_scaled, nc1, hits.double() / selection.examples, block


def _columns(features: list[Tensor], largest: Projection, columns: slice, *, is_first: bool) -> list[Tensor]:
    """Return a range of columns (B, columns) of the scaled layer, and with the first range Z (B, c_max · d_max)."""
    x = largest.scaled(features)
    return [x.flatten(1)[:, columns], *([largest.project(x).flatten(1)] if is_first else [])]


MAX_CHANNEL_COMPONENTS = 64  # of the largest projection that is measured
MAX_COMPONENTS = 2048  # of both modes together


def fit_tucker(
    backbone: Backbone,
    train: ImageDataset,
    selection: ImageDataset,
    settings: FitSettings,
    compute: Compute,
    kept: KeptFeatures | None = None,  # features of the training images of this process that an earlier pass computed
) -> tuple[Projection, ProjectionReport, Float[Tensor, "c_max d_max"]]:
    """Fit the largest projection, on the device, measure its sizes on the selection split and choose one.

    The tensor is the standard deviation of every component of Z, float64.
    """
    c_proj = settings.c_proj
    step = feature_step(backbone, compute.precision)
    with torch.inference_mode():
        features = backbone(trial_input(train.preprocess).to(compute.device))[0]
    shapes = [(layer.shape[1], layer.shape[2]) for layer in features]
    names, shard = backbone.layers, compute.shard(train)
    if kept is None:
        kept = KeptFeatures(len(shard), compute.max_memory, compute.device)
    kept.make_room(dict(zip(names, shapes, strict=True)))
    chosen = kept.of(names)
    if all(d == 1 for _, d in shapes):
        shapes = [(1, c) for c, _ in shapes]  # as reshape_features lays out vectors
    positions = [reduced_positions(c, d, compute.max_memory // len(shapes) ** 2) for c, d in shapes]
    note = ""
    if positions != (have := [d for _, d in shapes]):
        budget = f"{compute.max_memory >> 20} MiB"
        note = f"positions {have} → {positions} by average pooling, to keep the covariance within {budget}"
    c_max, d_max = largest_sizes(shapes[0][0], sum(positions), c_proj, settings.d_proj)

    def features_of_examples() -> Iterator[Tensor]:
        for features, batch in passes(shard, compute, "moments", step, kept=chosen):
            yield batch.per_example(reshape_features(features, positions)).float()

    moments = channel_moments(features_of_examples(), all_reduce=compute.sum_)
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
    (scaled_nc1, scaled_nc4), nc1, nc4, block = measure_sizes(largest, shard, selection, compute, step, kept=chosen)
    z_mean, z_std = block.mean_and_std()
    if not settings.no_second_scaling:
        largest = largest.with_second_scaling(z_mean, z_std)
    nc1, nc4 = nc1.cpu(), nc4.cpu()
    choice = choose_ranks(nc1, nc4, scaled_nc4, settings)
    return largest, ProjectionReport(*choice, scaled_nc1, scaled_nc4, nc1, nc4, note), z_std.view(c_max, d_max).cpu()


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


@dataclass(frozen=True)
class FittedProjection:
    """A projection, its report, and the layers that it reads."""

    projection: Projection
    report: ProjectionReport
    layers: tuple[str, ...]
