"""Maps that show how unusual an image is at each position of an early layer, and where it is most unusual.

The features of an image at position p are a vector ``x_p`` of C channels.  Two models of such vectors, over images
*and* positions, say how far it is from those of training images; a fit takes what finds synthetic patches better:

    ``q_p = ‖ (x_p − μ) A ‖²``     gaussian: with their mean ``μ`` and covariance ``Σ``
    ``q_p = min_i ‖ x_p − b_i ‖``   nearest: with N stored vectors ``b_i`` (PatchCore; Roth et al. 2022)
    ``d_p`` = the mean of q over p and its neighbours in the grid, corners included

``A`` (C, P) whitens the P components of least variance.  The Gaussian is better on photographs; among drawings such as
digits it finds each stroke unusual.  It reads the same :data:`POSITIONS` positions in each image, drawn once:
neighbours are alike, and a pass costs only a few hundredths of the network's time.

Channels are scaled to unit variance; a channel below :data:`.DEAD_UNIT` of the layer's root mean square is scaled as if
it had that much.  Of the components of the correlation, C = U diag(λ) Uᵀ, the half of least variance is kept, at most
:data:`MAX_COMPONENTS`:

    A = diag(1/σ) U_kept diag(λ_kept^(−1/2))

Directions in which in-distribution images hardly vary detect unusual images best (Rippel, Mertens & Merhof 2021),
because all images differ in the leading directions.  Components whose variance is only rounding, below
:data:`.EIGENVALUE_FLOOR` or the squared resolution of the features, are dropped.

A grey level says how rare a distance is among in-distribution images.  Level g is reached by a fraction
``10^(−4 g / 255)`` of their positions: 0 by all, 64 by one in ten, 128 by one in a hundred, 255 by one in 10,000.  Its
threshold is the distance that this fraction of positions reaches.  Of m sorted values ``r_1 ≤ … ≤ r_m`` the i-th is
reached by ``t_i = (m + 1 − i) / (m + 1)``, and ``log t`` is linear in between; beyond ``r_m`` it falls with the mean
excess of the largest, like the tails of the checks.  A threshold lies :data:`DISTANCE_ROUNDING` above its value, so
that equal distances, such as those of a black background, have the same level in spite of rounding.

Shapes: B images, C channels, S positions of the layer, of which rows × columns show the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from psc_core.checks import KINDS_KEY, PATCHES, least_regret, paste
from psc_core.compute import Compute, track_images
from psc_core.data.dataset import ImageDataset, draw
from psc_core.errors import BundleError, FitError
from psc_core.fitted import Fitted, Record
from psc_core.images.decode import as_base64, png_of
from psc_core.images.preprocess import Pixels
from psc_core.linalg import DEAD_UNIT, EIGENVALUE_FLOOR, TAIL_FRACTION, MomentSums, eigh, rounding_of, tail_excess

MIN_SIDE: Final = 4  # minimum number of rows and of columns of a map
MAX_POSITIONS: Final = 1 << 12  # of a map, 64 × 64, which take about 4 KiB in memory and as PNG
MAX_LEADING: Final = 8  # maximum number of leading tokens that show no part of the image: the class token and registers


@dataclass(frozen=True)
class Grid:
    """``rows`` × ``columns`` positions, row-major, after ``first`` positions that show no part of the image."""

    rows: int
    columns: int
    first: int = 0

    @property
    def positions(self) -> int:
        return self.first + self.rows * self.columns


def grid_of(positions: int, height: int, width: int) -> Grid | None:
    """Return the grid of a layer with this number of positions, or None if no map can be made of it.

    Convolutions and patches take the same steps down and across, so rows : columns = height : width, each rounded.  Of
    the factorisations of ``positions`` the nearest to this ratio is taken, for a square image only a square; if there
    is none, the first positions are taken for leading tokens, as few as possible.
    """
    for first in range(MAX_LEADING + 1):
        inside = positions - first
        if not MIN_SIDE**2 <= inside <= MAX_POSITIONS:
            continue
        fitting = [
            (abs(rows * width - columns * height), rows)
            for rows in range(MIN_SIDE, inside // MIN_SIDE + 1)
            if rows * (columns := inside // rows) == inside and _may_be(rows, columns, height, width)
        ]
        if fitting:
            rows = min(fitting)[1]
            return Grid(rows, inside // rows, first)
    return None


def _may_be(rows: int, columns: int, height: int, width: int) -> bool:
    """Return whether the sides agree up to rounding: rows × width / height is within one of the columns."""
    if height == width:
        return rows == columns
    return abs(rows * width - columns * height) <= min(height, width) and rows <= height and columns <= width


Grey = npt.NDArray[np.uint8]  # the grey levels (rows, columns) of a map; brighter is more unusual


# The brightness, relative to the brightest level, where a box ends: at 0.5 boxes are half as large again, and their
# middle is more often off.
BOX: Final = 0.6


def box_of(grey: Grey) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the most unusual region, as fractions of the width and height of the input.

    A region is a connected set, corners included, of positions at least :data:`BOX` times as bright as the brightest.
    The one with the largest sum of grey levels is taken, on a tie the first.  A black map's box is the whole image.
    """
    from scipy import ndimage  # Imported here, so that a model that only predicts does not load it.

    regions, _ = ndimage.label(grey >= BOX * int(grey.max()), np.ones((3, 3), bool))
    sums = np.bincount(regions.ravel(), weights=grey.ravel())
    region = int(sums[1:].argmax()) + 1
    rows, columns = ndimage.find_objects(regions)[region - 1]
    height, width = grey.shape
    return columns.start / width, rows.start / height, columns.stop / width, rows.stop / height


def map_document(layer: str, grey: Grey) -> dict[str, Any]:
    """Return the map of one image as the member :class:`psc_core.answers.ExplanationMap` of an answer."""
    return {"layer": layer, "png": as_base64(png_of(grey)), "peak": int(grey.max()), "box": box_of(grey)}


LEVELS: Final = 255  # the number of grey levels above black, the largest 8-bit number
DECADES: Final = 4  # the number of powers of ten between the rarity of black and of white
SERVE_ELEMENTS: Final = 1 << 24  # maximum size B × C × S of a block of differences (64 MiB); larger batches are split


class PositionDensity(Fitted):
    """``mean`` (C,), ``whitener`` (C, P), and ascending squared distances ``thresholds`` (255,) of the grey levels."""

    kind = "gaussian"
    layout: ClassVar = {"mean": ("channels",), "whitener": ("channels", "kept"), "thresholds": ("levels",)}

    def forward(self, features: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch positions"]:
        """Return the squared distances from the mean, in variances."""
        batch = max(1, SERVE_ELEMENTS // features[0].numel()) if len(features) else 1
        if len(features) > batch:
            return torch.cat([self(part) for part in torch.split(features, batch)])
        # Subtract the mean first: the components of least variance are small differences of large terms.
        whitened = self.whitener.T @ (features.float() - self.mean[:, None])
        return whitened.square().sum(dim=1)

    def grey(self, distances: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
        """Return the grey levels of distances, 0 to 255."""
        return torch.bucketize(distances, self.thresholds, right=True).to(torch.uint8)


class NearestPositions(PositionDensity):
    """``stored`` (N, C), and ``thresholds`` of distances to the nearest of these vectors."""

    kind = "nearest"
    layout: ClassVar = {"stored": ("stored", "channels"), "thresholds": ("levels",)}

    def forward(self, features: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch positions"]:
        found, mean = [], self.stored.mean(dim=0)
        for part in torch.split(features, max(1, SERVE_ELEMENTS // (features.shape[2] * len(self.stored)))):
            vectors = part.float().transpose(1, 2)
            # cdist is a matrix product: fast, but inexact where distances are small beside the vectors.
            nearest = self.stored[torch.cdist(vectors - mean, self.stored - mean).argmin(dim=2)]
            found.append(torch.linalg.vector_norm(vectors - nearest, dim=2))
        return torch.cat(found)


POSITION_DENSITIES: Final = {each.kind: each for each in (PositionDensity, NearestPositions)}


class LayerMap(nn.Module):
    """Turns the features of a layer into grey levels; brighter is more unusual."""

    def __init__(self, layer: str, grid: Grid, density: PositionDensity) -> None:
        super().__init__()
        thresholds = density.thresholds
        if len(thresholds) != LEVELS or not bool((thresholds.diff() >= 0).all()):
            raise BundleError(f"expected {LEVELS} ascending thresholds of the map's grey levels; fit the bundle again")
        self.layer = layer
        self.grid = grid
        self.density = density

    def config(self) -> dict[str, Any]:
        """Return the section of a manifest as JSON types."""
        return {"layer": self.layer, "grid": asdict(self.grid), "density": self.density.config()}

    def check(self, features: Float[Tensor, "batch channels positions"]) -> None:
        """Raise :class:`BundleError` if the features are those of another layer."""
        expected = (self.density.sizes["channels"], self.grid.positions)
        if features.shape[1:] != expected:
            raise BundleError(
                f"expected {expected} channels and positions from {self.layer} for the map, got "
                f"{tuple(features.shape[1:])}; fit the bundle again"
            )

    def distances(self, features: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch rows columns"]:
        """Return the distances at the positions of the image, each averaged over its 3 × 3 neighbours."""
        inside: Tensor = self.density(features[:, :, self.grid.first :])
        alone = inside.view(-1, 1, self.grid.rows, self.grid.columns)
        # Anomalous regions are seldom a single position wide, but noise is.
        return functional.avg_pool2d(alone, 3, stride=1, padding=1, count_include_pad=False)[:, 0]

    def forward(self, features: Float[Tensor, "batch channels positions"]) -> UInt8[Tensor, "batch rows columns"]:
        """Return the grey levels at the positions of the image."""
        grey: Tensor = self.density.grey(self.distances(features))
        return grey


POSITIONS: Final = 256  # maximum number of positions that are read in an image
MAX_CHANNELS: Final = 2048  # maximum number of channels; their covariance takes 32 MiB


class LayerMoments(NamedTuple):
    vectors: int  # number of vectors
    mean: Float[Tensor, " channels"]
    covariance: Float[Tensor, "channels channels"]
    resolution: float  # spacing of the features' dtype at 1


class PositionMoments:
    """The sums over the images so far."""

    def __init__(self, channels: int, grid: Grid, device: torch.device | str = "cpu") -> None:
        self.grid = grid
        drawn = torch.randperm(grid.rows * grid.columns, generator=torch.Generator().manual_seed(0))[:POSITIONS]
        self._read = (grid.first + drawn.sort().values).to(device)
        self._sums = MomentSums(1, channels, device)
        self._resolution = 0.0

    def add(self, features: Float[Tensor, "batch channels positions"]) -> None:
        self._resolution = max(self._resolution, torch.finfo(features.dtype).eps)
        self._sums.add(features.index_select(2, self._read).transpose(1, 2).reshape(-1, 1, features.shape[1]))

    def finish(self, sum_: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> LayerMoments:
        """Return the moments, see :meth:`.MomentSums.finish`."""
        vectors, mean, covariance = self._sums.finish(sum_)
        return LayerMoments(vectors, mean[0], covariance[0], self._resolution)


MAX_COMPONENTS: Final = 128  # maximum number of components, so that a map costs a few hundredths of the network
DISTANCE_ROUNDING: Final = 1e-4  # maximum relative difference between two ways to compute a distance


def fit_positions(moments: LayerMoments) -> PositionDensity:
    """Fit the Gaussian of a position; its thresholds are 0 until :func:`with_levels` sets them."""
    variance = moments.covariance.diagonal()
    if not (bool(moments.mean.isfinite().all()) and bool(variance.isfinite().all())):
        raise FitError("expected finite features for a map; check the weights, or use --precision fp32")
    scale = variance.mean().sqrt()
    if bool(scale <= rounding_of(moments.mean.square().mean().sqrt())):
        raise FitError("expected features that differ between positions for a map, got the same at all")
    std = torch.maximum(variance.sqrt(), DEAD_UNIT * scale)
    values, vectors = eigh(moments.covariance / std[:, None] / std)
    exact = values > max(EIGENVALUE_FLOOR, moments.resolution**2)
    values, vectors = values[exact], vectors[:, exact]
    kept = min(math.ceil(len(variance) / 2), MAX_COMPONENTS, len(values))
    whitener = vectors[:, len(values) - kept :] * values[len(values) - kept :].rsqrt() / std[:, None]
    record: Record = {"vectors": moments.vectors, "resolved": len(values)}
    tensors = {"mean": moments.mean, "whitener": whitener, "thresholds": torch.zeros(LEVELS)}
    return PositionDensity(tensors, record=record)


MAX_STORED: Final = 1000  # maximum number of stored vectors, at most a tenth of those to choose from
PROJECTED: Final = 32  # number of random directions in which they are compared


def fit_nearest(vectors: Float[Tensor, "vectors channels"]) -> NearestPositions:
    """Store vectors, each the one farthest from those before; the thresholds are 0 until :func:`with_levels`."""
    directions = torch.randn(vectors.shape[1], PROJECTED, generator=torch.Generator().manual_seed(0))
    points, chosen = (vectors - vectors.mean(0)) @ directions.to(vectors.device), [0]
    lengths = points.square().sum(dim=1)
    away = torch.full_like(lengths, torch.inf)
    for _ in range(min(MAX_STORED, len(vectors) // 10) - 1):
        last = chosen[-1]  # ‖p − q‖² without ‖q‖², which is added to the numbers that are compared
        away = torch.minimum(away, torch.addmv(lengths, points, points[last], alpha=-2).add_(lengths[last]))
        chosen.append(int(away.argmax()))
    tensors = {"stored": vectors[torch.tensor(chosen)], "thresholds": torch.zeros(LEVELS)}
    return NearestPositions(tensors, record={"vectors": len(vectors)})


def with_levels(density: PositionDensity, distances: Float[Tensor, " m"]) -> PositionDensity:
    """Return the density with grey levels fitted to the distances of m in-distribution positions."""
    levels = thresholds(distances).clamp(min=DISTANCE_ROUNDING * float(distances.max()))  # Less is rounding.
    tensors = {**density.state_dict(), "thresholds": levels.to(density.thresholds.device)}
    return type(density)(tensors, record={**density.record, "values": len(distances)})


def thresholds(values: Float[Tensor, " m"]) -> Float[Tensor, " levels"]:
    """Return the distance of each grey level above black, ascending, float64."""
    ordered = values.double().sort().values.cpu().numpy()
    m = len(ordered)
    log_fractions = -DECADES * math.log(10) / LEVELS * np.arange(1, LEVELS + 1)
    log_ranks = np.log((m - np.arange(m)) / (m + 1))
    inside = np.interp(-log_fractions, -log_ranks, ordered)
    k = max(1, round(TAIL_FRACTION * m))
    excess = float(tail_excess(torch.from_numpy(ordered), k))
    beyond = np.maximum(0.0, -math.log(m + 1) - log_fractions) * excess
    return torch.from_numpy((1 + DISTANCE_ROUNDING) * (inside + beyond))


IMAGES: Final = 500  # maximum number of images of each split that a choice reads
VECTORS: Final = 20  # number of vectors to store that are drawn for each image, on average
POINTS: Final = 32  # number of points in each direction at which maps are compared


@torch.inference_mode()
def choose_map(
    features_of: Callable[[Pixels], Mapping[str, Tensor]],  # from pixels on the device to canonical features by layer
    moments: Mapping[str, PositionMoments],
    train: ImageDataset,
    selection: ImageDataset,  # in-distribution images that the moments have not seen
    compute: Compute,
    seed: int,
) -> tuple[LayerMap, dict[str, Any]] | None:
    """Return the map, of an early layer and a kind, that hits patches most often, and the comparison as JSON types.

    Of equally good maps it is that of the earliest layer; None where no layer can have a map.
    """
    if not moments:
        return None
    maps: dict[str, LayerMap] = {}
    vectors = _vectors(features_of, moments, draw(train, IMAGES, seed), compute)
    for layer, sums in moments.items():
        found = sums.finish(compute.sum_)  # In every process, whether or not a density can be fitted.
        with suppress(FitError):  # All positions look the same there.
            densities = fit_positions(found), fit_nearest(vectors[layer])
            maps |= {f"{layer} {each.kind}": LayerMap(layer, sums.grid, each) for each in densities}
    if not maps:
        return None
    real: dict[str, list[Tensor]] = {name: [] for name in maps}
    patched: dict[str, dict[str, list[Tensor]]] = {name: {patch: [] for patch in PATCHES} for name in maps}
    masks: dict[str, list[Tensor]] = {patch: [] for patch in PATCHES}
    generator = torch.Generator().manual_seed(seed)
    for batch in track_images(draw(selection, IMAGES, seed), compute, "map: images with a synthetic patch"):
        pixels = selection.preprocess.to_pixels(batch.images)
        for name, distances in _distances(maps, features_of(pixels.to(compute.device))).items():
            real[name].append(distances.flatten())
        for patch in PATCHES:
            images, mask = paste(pixels, patch, generator)
            masks[patch].append(_points(mask.float(), "nearest") > 0)
            for name, distances in _distances(maps, features_of(images.to(compute.device))).items():
                patched[name][patch].append(_points(distances, "bilinear"))
    hits = {
        name: {patch: _hits(torch.cat(of_map[patch]), torch.cat(masks[patch])) for patch in PATCHES}
        for name, of_map in patched.items()
    }
    name = [*maps][compute.first([*maps].index(least_regret(hits)))]
    chosen = maps[name]
    layers = [{"layer": of.layer, "kind": of.density.kind, "hits": [*hits[each].values()]} for each, of in maps.items()]
    density = with_levels(chosen.density, torch.cat(real[name]))
    record = {"chosen": chosen.layer, KINDS_KEY: list(PATCHES), "layers": layers}
    return LayerMap(chosen.layer, chosen.grid, density), record


def _vectors(
    features_of: Callable[[Pixels], Mapping[str, Tensor]],
    moments: Mapping[str, PositionMoments],
    train: ImageDataset,
    compute: Compute,
) -> dict[str, Float[Tensor, "vectors channels"]]:
    """Return random vectors of each early layer with a grid; every process draws the same."""
    generator, found = torch.Generator().manual_seed(0), {layer: list[Tensor]() for layer in moments}
    for batch in track_images(train, compute, "map: positions of training images"):
        features = features_of(train.preprocess.to_pixels(batch.images).to(compute.device))
        for layer, sums in moments.items():
            inside = features[layer][:, :, sums.grid.first :].float().transpose(1, 2).flatten(0, 1)
            drawn = torch.randperm(len(inside), generator=generator)[: VECTORS * len(batch.images)]
            found[layer].append(inside[drawn.to(inside.device)])
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def _distances(
    maps: Mapping[str, LayerMap], features: Mapping[str, Tensor]
) -> dict[str, Float[Tensor, "batch rows columns"]]:
    return {name: of.distances(features[of.layer]).cpu() for name, of in maps.items()}


def _points(maps: Float[Tensor, "batch _ _"], mode: str) -> Float[Tensor, "batch points"]:
    return functional.interpolate(maps[:, None], (POINTS, POINTS), mode=mode).flatten(1)


def _hits(distances: Float[Tensor, "n points"], patched: Bool[Tensor, "n points"]) -> float:
    """Return the fraction of images whose most unusual point lies in the patch."""
    return float(patched.gather(1, distances.argmax(1, keepdim=True)).double().mean())
