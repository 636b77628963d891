r"""Deep Vecchia ensemble (Jimenez & Katzfuss 2025, arXiv 2305.17063): a Gaussian process on each of several layers.

Layer l reduces its standardised features φ to ``x_l = φ B_l``, Q ≤ 64 numbers in length-scales (ARD: one for each
column of ``B_l``).  Numbers t have mean 0 and deviation 1.  With N, the m training images nearest in x_l (Vecchia 1988)
and the Matérn 5/2 kernel,

    k(x, x') = s_l² (1 + √5 r + 5r²/3) exp(−√5 r),   r = ‖x − x'‖ (Rasmussen & Williams 2006, equation 4.17)
    μ_l = k_Nᵀ (K_NN + τ_l² I)⁻¹ t_N,   v_l = s_l² − k_Nᵀ (K_NN + τ_l² I)⁻¹ k_N,   σ_l² = v_l + τ_l²

The layers are experts of a generalised product (Cao & Fleet 2014); one that learned more of this image counts for more:

    β_l ∝ ½ log((s_l² + τ_l²) / σ_l²) + ε,   Σ β_l = 1      entropy before its neighbours were seen minus after, nats
    1/σ² = Σ β_l / σ_l²,   μ = σ² Σ β_l μ_l / σ_l²

ε = 10⁻⁶ makes the weights equal where no layer learned anything; there σ is that of the prior.  Ours is the division
``aleatoric² = σ² Σ w_l τ_l²/σ_l²``, ``w_l ∝ β_l/σ_l²``, ``Σ w_l = 1``; the rest of σ² is epistemic.  Deviations
contain one more factor, chosen on the selection split (:mod:`psc_core.tasks.regression.fit.dve`).

Neighbours are exact: a matrix product and ``topk`` on blocks of at most :data:`BLOCK` support images, on any device, so
that memory does not grow with their number.  Distances to the chosen ones are differences, and solves float64.

Shapes: B images, D columns, L layers, n support images, m neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.errors import FitError
from psc_core.tasks.regression.heads.base import HeadOutput, RegressionHead

BLOCK: Final = 1 << 13
"""Number of support images that distances are computed to at once."""

IMAGES: Final = 256
"""Number of images that are answered at once."""

LEAST_WEIGHT: Final = 1e-6
"""ε, nats."""

SHOWN: Final = 3
"""Number of neighbours of each layer that an explanation names."""


class Neighbours(NamedTuple):
    """The nearest stored points of B points, the nearest first."""

    positions: Int[Tensor, "batch m"]
    squared: Float[Tensor, "batch m"]  # distances, squared


class Experts(NamedTuple):
    """The predictions of the layers for B images; numbers have deviation 1."""

    mean: Float[Tensor, "layers batch"]
    variance: Float[Tensor, "layers batch"]  # noise included
    nearest: list[Neighbours]  # of each layer, the SHOWN nearest


class Combined(NamedTuple):
    """The product of the experts; numbers have deviation 1."""

    mean: Float[Tensor, " batch"]
    variance: Float[Tensor, " batch"]
    noise: Float[Tensor, " batch"]  # the part of it that is noise
    weight: Float[Tensor, "layers batch"]  # β


class DeepVecchiaHead(RegressionHead):
    """The ensemble described above: ``basis`` holds the B_l, ``points`` the x_l of the support images.

    ``images`` are the positions of the support images among those it was fitted on, ``neighbours`` is m.
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
    basis: Tensor
    points: Tensor
    values: Tensor
    images: Tensor
    signal: Tensor
    noise: Tensor
    neighbours: Tensor
    value_center: Tensor
    value_scale: Tensor
    deviation_factor: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], *, record: Mapping[str, float | int]) -> None:
        super().__init__(tensors, record=record)
        self.m = int(self.neighbours)
        if not (0 < self.m <= len(self.values) and self.m == float(self.neighbours)):
            raise FitError(f"expected dve.neighbours from 1 to {len(self.values)}, got {float(self.neighbours):g}")
        if not bool((torch.stack([self.signal, self.noise]) > 0).all()):
            raise FitError("expected positive variances in dve.signal and dve.noise; fit it again")

    def experts(self, z: Float[Tensor, "batch dim"]) -> Experts:
        """Return mean and variance of each layer's process, and its nearest support images."""
        phi = self.standardise(z)
        means, variances, nearest = [], [], []
        for basis, points, signal, noise in zip(self.basis, self.points, self.signal, self.noise, strict=True):
            x = phi @ basis
            found = nearest_points(x, points, self.m)
            mean, variance = condition(x, points[found.positions], self.values[found.positions], signal, noise)
            means.append(mean)
            variances.append(variance + noise.double())
            nearest.append(Neighbours(found.positions[:, :SHOWN], found.squared[:, :SHOWN]))
        return Experts(torch.stack(means), torch.stack(variances), nearest)

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Return the mean, and the standard deviations of noise and of what the neighbours leave unknown."""
        return join([self._output(part) for part in torch.split(z, IMAGES)])

    def _output(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        experts = self.experts(z)
        product = combine(experts.mean, experts.variance, self.signal, self.noise)
        deviation = self.value_scale * self.deviation_factor
        left = (product.variance - product.noise).clamp(min=0)
        return HeadOutput(
            self.value_center + self.value_scale * product.mean.float(),
            deviation * product.noise.sqrt().float(),
            deviation * left.sqrt().float(),
        )

    def explain(self, z: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        """Return the nearest support images of each layer, (B, L, k), and the weight of each layer, (B, L)."""
        parts = []
        for part in torch.split(z, IMAGES):
            experts = self.experts(part)
            index = torch.stack([found.positions for found in experts.nearest], dim=1)
            squared = torch.stack([found.squared for found in experts.nearest], dim=1)
            weight = combine(experts.mean, experts.variance, self.signal, self.noise).weight
            values = self.value_center + self.value_scale * self.values[index]
            parts.append((self.images[index], values, squared.sqrt(), weight.T.float()))
        names = ("neighbour_image", "neighbour_value", "neighbour_distance", "layer_weight")
        return {name: torch.cat(tensors) for name, tensors in zip(names, zip(*parts, strict=True), strict=True)}


def join(parts: list[HeadOutput]) -> HeadOutput:
    """Return the outputs of consecutive batches as one."""
    return parts[0] if len(parts) == 1 else HeadOutput(*(torch.cat(part) for part in zip(*parts, strict=True)))


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
    best, index = x.new_empty(len(x), 0), torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
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
    r = math.sqrt(5) * torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")
    return (1 + r + r.square() / 3) * (-r).exp()


def condition(
    x: Float[Tensor, "batch reduced"],
    neighbours: Float[Tensor, "batch m reduced"],
    values: Float[Tensor, "batch m"],
    signal: Float[Tensor, ""],
    noise: Float[Tensor, ""],
    known: Float[Tensor, "batch m"] | None = None,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return the process at ``x`` given its neighbours, float64; ``known`` is 0 for those to ignore."""
    x, neighbours, values = x.double(), neighbours.double(), values.double()
    signal, noise = signal.double(), noise.double()
    across, inside = signal * matern(neighbours, x[:, None])[..., 0], signal * matern(neighbours, neighbours)
    if known is not None:
        across, values, inside = across * known, values * known, inside * known[:, :, None] * known[:, None]
    inside = inside + noise * torch.eye(inside.shape[1], dtype=inside.dtype, device=inside.device)
    root = torch.linalg.cholesky_ex(inside).L
    both = torch.stack([across, values], dim=2)
    half = torch.linalg.solve_triangular(root, both, upper=False)
    mean = (half[..., 0] * half[..., 1]).sum(1)
    return mean, (signal - half[..., 0].square().sum(1)).clamp(min=0)


def combine(
    mean: Float[Tensor, "layers batch"],
    variance: Float[Tensor, "layers batch"],
    signal: Float[Tensor, " layers"],
    noise: Float[Tensor, " layers"],
) -> Combined:
    """Return the generalised product of experts; ``variance`` includes the noise."""
    signal, noise = signal.double()[:, None], noise.double()[:, None]
    learned = 0.5 * ((signal + noise) / variance).log()
    weight = learned.clamp(min=0) + LEAST_WEIGHT
    weight = weight / weight.sum(0)
    precision = weight / variance
    whole = 1 / precision.sum(0)
    of_noise = whole * (precision * noise / variance).sum(0) / precision.sum(0)
    return Combined(whole * (precision * mean).sum(0), whole, of_noise, weight)
