"""Deep Vecchia ensemble (Jimenez & Katzfuss 2025, arXiv 2305.17063): a Gaussian process on each of several layers.

Layer l reduces its standardised features φ to ``x_l = φ B_l``, Q ≤ 64 numbers in length-scales (ARD: one for each
column of ``B_l``).  Numbers t have mean 0 and deviation 1.  With N, the m training images nearest in x_l (Vecchia 1988)
and the Matérn 5/2 kernel,

    k(x, x') = s_l² (1 + √5 r + 5r²/3) exp(−√5 r),   r = ‖x − x'‖ (Rasmussen & Williams 2006, equation 4.17)
    μ_l = k_Nᵀ (K_NN + τ_l² I)⁻¹ t_N,   v_l = s_l² − k_Nᵀ (K_NN + τ_l² I)⁻¹ k_N,   σ_l² = v_l + τ_l²

The layers are experts of a generalised product (Cao & Fleet 2014); one that learned more of this image counts for more:

    β_l ∝ ½ log((s_l² + τ_l²) / σ_l²) + ε,   Σ β_l = 1      entropy before its neighbours were seen minus after, nats
    1/σ² = Σ β_l / σ_l²,   μ = σ² Σ β_l μ_l / σ_l²

ε = 10⁻⁶ makes the weights equal where no layer learned anything; there σ is that of the prior.  Ours is the division
``aleatoric² = σ² Σ w_l τ_l²/σ_l²``, ``w_l ∝ β_l/σ_l²``, ``Σ w_l = 1``; the rest of σ² is epistemic.

Neighbours are exact: a matrix product and ``topk`` on blocks of at most :data:`BLOCK` neighbour images, on any device,
so that memory does not grow with their number.  Distances to the chosen ones are differences, and solves float64.

The fit reduces each layer first: one axis is the direction of Bayesian linear regression of the number, the
others are principal components of what is left.  (The paper takes a layer as it is; where its axes are of equal
variance, as z's are, principal components alone would lose what predicts the number.)  Length-scales, signal s² and
noise τ² then minimise the Vecchia approximation of the NLL (Vecchia 1988)

    −log p(t) ≈ −Σ_i log N(t_i; μ_i, v_i + τ²)

with images in random order, μ_i and v_i given the m nearest *earlier* ones in length-scales; m = n − 1 makes it exact.
Adam follows it on random images; neighbours are found anew in every step.  Every :data:`CHECK` steps the NLL of the
selection split is measured, and the least one kept; after :data:`PATIENCE` checks without a new least the fit ends.
Last, as in :mod:`.blr`, both variances of the whole ensemble are multiplied by the mean of ``(y − μ)²/σ²`` over the
selection split.

Shapes: B images, D columns, L layers, n neighbour images, m neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.errors import FitError
from psc_core.features import FeatureMatrix, blocks
from psc_core.heads.base import RegressionData, RegressionHead, RegressionOutput
from psc_core.heads.blr import fit_posterior, gaussian_nll, scale_posterior, selection_record
from psc_core.linalg import distances, eigh, fix_signs, inner_products

BLOCK: Final = 1 << 13  # number of neighbour images that distances are computed to at once
IMAGES: Final = 256  # number of images that are answered at once
LEAST_WEIGHT: Final = 1e-6  # ε, nats
SHOWN: Final = 3  # number of neighbours of each layer that an explanation names


class Neighbours(NamedTuple):
    """The nearest stored points of B points, the nearest first."""

    positions: Int[Tensor, "batch m"]
    squared: Float[Tensor, "batch m"]  # distances, squared


class Product(NamedTuple):
    """The product of the experts for B images; numbers have deviation 1."""

    mean: Float[Tensor, " batch"]
    variance: Float[Tensor, " batch"]  # noise included
    noise: Float[Tensor, " batch"]  # the part of it that is noise
    weight: Float[Tensor, "layers batch"]  # β
    nearest: list[Neighbours]  # of each layer, the SHOWN nearest


class DeepVecchiaHead(RegressionHead):
    """The ensemble described above: ``basis`` holds the B_l, ``points`` the x_l of the neighbour images.

    ``images`` are the positions of the neighbour images among those it was fitted on, ``neighbours`` is m.
    """

    kind = "dve"
    reads_layers = True
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "basis": ("layers", "dim", "reduced"),
        "points": ("layers", "points", "reduced"),
        "values": ("points",),
        "images": ("points",),
        "signal": ("layers",),
        "noise": ("layers",),
        "neighbours": (),
        "value_center": (),
        "value_scale": (),
        "deviation_factor": (),
    }
    in_float64 = frozenset({"images"})

    def __init__(self, tensors: Mapping[str, Tensor], *, record: Mapping[str, float | int]) -> None:
        super().__init__(tensors, record=record)
        self.m = int(self.neighbours)
        if not (0 < self.m <= len(self.values) and self.m == float(self.neighbours)):
            raise FitError(f"expected dve.neighbours from 1 to {len(self.values)}, got {float(self.neighbours):g}")
        if not bool((torch.stack([self.signal, self.noise]) > 0).all()):
            raise FitError("expected positive variances in dve.signal and dve.noise; fit it again")

    @classmethod
    def fit(cls, data: RegressionData) -> DeepVecchiaHead:
        """Fit reduction and process of each layer, and the factor of all deviations."""
        generator = torch.Generator().manual_seed(data.seed)
        device = data.train_values.device
        kept = torch.randperm(len(data.train), generator=generator)[:MAX_POINTS].to(device)
        checked = torch.randperm(len(data.selection), generator=generator)[:CHECKED_IMAGES].to(device)
        t, m = data.train_values[kept], min(NEIGHBOURS, len(kept))
        reduced = min(MAX_REDUCED, max(data.widths))
        bases, points, variances = [], [], []
        for end, width in zip(accumulate(data.widths), data.widths, strict=True):
            columns = slice(end - width, end)
            layer = data.train.columns(end - width, width)
            axes = reduction(layer, data.train_values, reduced)
            x, x_val = (columns_of(part, axes) for part in (layer.take(kept), data.selection[checked, columns]))
            process = fit_process(x, t, x_val, data.selection_values[checked], m, generator)
            basis = axes.new_zeros(data.selection.shape[1], reduced)
            basis[columns, : axes.shape[1]] = axes * (-process.length).exp()
            bases.append(basis)
            points.append(functional.pad(x * (-process.length).exp(), (0, reduced - axes.shape[1])))
            variances.append(torch.stack(process.variances))
        signal, noise = torch.stack(variances, dim=1)
        tensors = {
            **data.standardisation._asdict(),
            "basis": torch.stack(bases),
            "points": torch.stack(points),
            "values": t,
            "images": data.train_images[kept],
            "signal": signal,
            "noise": noise,
            "neighbours": torch.tensor(float(m)),
            "value_center": data.center,
            "value_scale": data.scale,
            "deviation_factor": torch.ones(()),
        }
        mean, factor, nll = scale_posterior(data, *predict(cls(tensors, record={}).to(device), data))
        tensors["deviation_factor"] = torch.tensor(math.sqrt(factor))
        return cls(tensors, record=selection_record(data, mean, factor, nll))

    def product(self, z: Float[Tensor, "batch dim"]) -> Product:
        """Return the generalised product of the layers' processes, and the nearest neighbour images of each."""
        phi = self.standardise(z)
        means, variances, nearest = [], [], []
        for basis, points, signal, noise in zip(self.basis, self.points, self.signal, self.noise, strict=True):
            x = phi @ basis
            found = nearest_points(x, points, self.m)
            mean, variance = condition(x, points[found.positions], self.values[found.positions], signal, noise)
            means.append(mean)
            variances.append(variance + noise.double())
            nearest.append(Neighbours(found.positions[:, :SHOWN], found.squared[:, :SHOWN]))
        variance, signal, noise = torch.stack(variances), self.signal.double()[:, None], self.noise.double()[:, None]
        learned = 0.5 * ((signal + noise) / variance).log()
        weight = learned.clamp(min=0) + LEAST_WEIGHT
        weight = weight / weight.sum(0)
        precision = weight / variance
        whole = 1 / precision.sum(0)
        of_noise = whole * (precision * noise / variance).sum(0) / precision.sum(0)
        return Product(whole * (precision * torch.stack(means)).sum(0), whole, of_noise, weight, nearest)

    def forward(self, z: Float[Tensor, "batch dim"]) -> RegressionOutput:
        parts, deviation = [], self.value_scale * self.deviation_factor
        for part in [z] if torch.compiler.is_exporting() else torch.split(z, IMAGES):
            product = self.product(part)
            left = (product.variance - product.noise).clamp(min=0)
            mean = self.value_center + self.value_scale * product.mean.float()
            parts.append((mean, deviation * product.noise.sqrt().float(), deviation * left.sqrt().float()))
        return RegressionOutput(*map(torch.cat, zip(*parts, strict=True)))

    def explain(self, z: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        """Return the nearest neighbour images of each layer, (B, L, k), and the weight of each layer, (B, L)."""
        parts = []
        for part in torch.split(z, IMAGES):
            product = self.product(part)
            index, squared = (torch.stack(each, dim=1) for each in zip(*product.nearest, strict=True))
            values = self.value_center + self.value_scale * self.values[index]
            parts.append((self.images[index], values, squared.sqrt(), product.weight.T.float()))
        names = ("neighbour_image", "neighbour_value", "neighbour_distance", "layer_weight")
        return dict(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))


def nearest_points(
    x: Float[Tensor, "batch reduced"],
    points: Float[Tensor, "n reduced"],
    m: int,
    before: Int[Tensor, " batch"] | None = None,
) -> Neighbours:
    """Return the m nearest of ``points`` of each row of ``x``, in blocks of :data:`BLOCK`.

    With ``before``, only the first ``before[i]`` points count for row i; where there are fewer than m, the rest of its
    neighbours are at distance ∞.
    """
    best, index = x.new_empty(x.shape[0], 0), torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
    for start in range(0, len(points), BLOCK):
        block = points[start : start + BLOCK]
        here = torch.arange(start, start + len(block), device=x.device)
        apart = torch.addmm(block.square().sum(1), x, block.T, alpha=-2)  # Without ‖x‖², the same for all points.
        if before is not None:
            apart = apart.masked_fill(here >= before[:, None], math.inf)
        near, position = apart.topk(min(m, len(block)), dim=1, largest=False, sorted=False)
        best, index = torch.cat([best, near], dim=1), torch.cat([index, here[position]], dim=1)
        if best.shape[1] > m:
            best, position = best.topk(m, dim=1, largest=False, sorted=False)
            index = index.gather(1, position)
    squared = (points[index] - x[:, None]).square().sum(2)
    squared = squared.masked_fill(best.isinf(), math.inf)
    squared, order = squared.sort(dim=1)
    return Neighbours(index.gather(1, order), squared)


def matern(
    one: Float[Tensor, "*batch n reduced"], other: Float[Tensor, "*batch m reduced"]
) -> Float[Tensor, "*batch n m"]:
    """Return the correlations of all pairs; their distances are of differences, which do not cancel."""
    r = math.sqrt(5) * distances(one, other)
    return (1 + r + r.square() / 3) * (-r).exp()


def condition(
    x: Float[Tensor, "batch reduced"],
    neighbours: Float[Tensor, "batch m reduced"],
    values: Float[Tensor, "batch m"],
    signal: Float[Tensor, ""],
    noise: Float[Tensor, ""],
    known: Float[Tensor, "batch m"] | None = None,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return the process at ``x`` given its neighbours, in float64; ``known`` is 0 for those to ignore."""
    x, neighbours, values, signal, noise = (part.double() for part in (x, neighbours, values, signal, noise))
    across, inside = signal * matern(neighbours, x[:, None])[..., 0], signal * matern(neighbours, neighbours)
    if known is not None:
        across, values, inside = across * known, values * known, inside * known[:, :, None] * known[:, None]
    inside = inside + noise * torch.eye(inside.shape[1], dtype=inside.dtype, device=inside.device)
    products = inner_products(inside, torch.stack([across, values], dim=2))
    return products[:, 0, 1], (signal - products[:, 0, 0]).clamp(min=0)


MAX_REDUCED: Final = 64  # maximum number of axes that a layer is reduced to
MAX_POINTS: Final = 50_000  # maximum number of training images that a head stores
NEIGHBOURS: Final = 32  # m
STEPS: Final = 300  # maximum number of steps of Adam for each layer

CHECK: Final = 20
PATIENCE: Final = 3
BATCH: Final = 128  # number of images of a step
RATE: Final = 0.05  # learning rate of Adam; parameters are logarithms
CHECKED_IMAGES: Final = 1000  # maximum number of selection images that end the fit of a layer
LEAST_NOISE: Final = 1e-4  # minimum τ² where the numbers have deviation 1
RANGES: Final = ((-7.0, 7.0), (-7.0, 4.0), (-12.0, 1.0))  # of the parameters, where all axes together deviate by 1


class GaussianProcess(NamedTuple):
    """The Gaussian process of one layer, by the logarithms of its parameters."""

    length: Float[Tensor, " reduced"]
    signal: Float[Tensor, ""]
    noise: Float[Tensor, ""]  # of τ² − LEAST_NOISE

    @property
    def variances(self) -> tuple[Tensor, Tensor]:
        """s² and τ²."""
        return self.signal.exp(), self.noise.exp() + LEAST_NOISE


def predict(head: DeepVecchiaHead, data: RegressionData) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Return mean and whole variance of the selection images; numbers have deviation 1."""
    center, inverse_scale = data.standardisation
    parts = [head.product((phi / inverse_scale + center).float()) for phi in torch.split(data.selection, IMAGES)]
    return torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])


def columns_of(
    features: Float[Tensor, "n width"] | FeatureMatrix, axes: Float[Tensor, "width reduced"]
) -> Float[Tensor, "n reduced"]:
    """Return the coordinates of every image, computed in blocks."""
    return torch.cat([block @ axes for _, block in blocks(features)])


def reduction(
    phi: Float[Tensor, "n width"] | FeatureMatrix, t: Float[Tensor, " n"], reduced: int
) -> Float[Tensor, "width axes"]:
    """Return up to ``reduced`` orthonormal axes: the regression's direction, then principal components of the rest."""
    width = phi.shape[1]
    weight = fit_posterior(phi, t).mean
    first = weight / weight.norm().clamp(min=1e-12)
    gram = torch.zeros(width, width, dtype=torch.float64, device=t.device)
    for _, block in blocks(phi):
        rest = block - (block @ first)[:, None] * first
        gram.addmm_(rest.T, rest)
    components = eigh(gram).vectors[:, : min(reduced, width) - 1]
    return torch.cat([first[:, None], fix_signs(components)], dim=1)


def fit_process(
    x: Float[Tensor, "n reduced"],
    t: Float[Tensor, " n"],
    x_val: Float[Tensor, "k reduced"],
    t_val: Float[Tensor, " k"],
    m: int,
    generator: torch.Generator,
) -> GaussianProcess:
    """Return the parameters of the least selection NLL that Adam reaches; ``x`` is in random order."""
    scale = x.var(0, correction=0).sum().sqrt().clamp(min=1e-6)
    x, x_val = x / scale, x_val / scale
    best = GaussianProcess(x.new_zeros(x.shape[1]), x.new_zeros(()), x.new_tensor(0.1).log())
    parameters = [part.clone().requires_grad_() for part in best]
    least, since = selection_nll(x, t, x_val, t_val, m, best), 0
    optimizer = torch.optim.Adam(parameters, RATE)
    for step in range(1, STEPS + 1):
        chosen = torch.randint(0, len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        optimizer.zero_grad()
        torch.autograd.backward(vecchia_nll(x, t, chosen, m, GaussianProcess(*parameters)))
        optimizer.step()
        with torch.no_grad():
            for part, (low, high) in zip(parameters, RANGES, strict=True):
                part.clamp_(low, high)
        if step % CHECK == 0:
            now = GaussianProcess(*(part.detach().clone() for part in parameters))
            nll = selection_nll(x, t, x_val, t_val, m, now)
            best, least, since = (now, nll, 0) if nll < least else (best, least, since + 1)
            if since == PATIENCE:
                break
    return best._replace(length=best.length + scale.log())


def vecchia_nll(
    x: Float[Tensor, "n reduced"],
    t: Float[Tensor, " n"],
    chosen: Int[Tensor, " batch"],
    m: int,
    process: GaussianProcess,
) -> Float[Tensor, ""]:
    """Return the mean NLL of the numbers of the ``chosen`` images, each given its m nearest earlier ones."""
    scale, (signal, noise) = (-process.length).exp(), process.variances
    with torch.no_grad():
        scaled = (x * scale).float()
        near = nearest_points(scaled[chosen], scaled, m, before=chosen)
    known = near.squared.isfinite().double()
    mean, variance = condition(x[chosen] * scale, x[near.positions] * scale, t[near.positions], signal, noise, known)
    variance = variance + noise
    return 0.5 * ((t[chosen] - mean).square() / variance + variance.log() + math.log(2 * math.pi)).mean()


@torch.no_grad()
def selection_nll(
    x: Float[Tensor, "n reduced"],
    t: Float[Tensor, " n"],
    x_val: Float[Tensor, "k reduced"],
    t_val: Float[Tensor, " k"],
    m: int,
    process: GaussianProcess,
) -> float:
    """Return the mean NLL of selection images given their m nearest training images."""
    scale, (signal, noise) = (-process.length).exp(), process.variances
    scaled, total = (x * scale).float(), 0.0
    for at, t_at in zip(torch.split(x_val, IMAGES), torch.split(t_val, IMAGES), strict=True):
        near = nearest_points((at * scale).float(), scaled, m)
        mean, variance = condition(at * scale, x[near.positions] * scale, t[near.positions], signal, noise)
        total += len(t_at) * gaussian_nll(t_at, mean, variance + noise)
    return total / len(t_val)
