r"""Fit :class:`.heads.dve.DeepVecchiaHead`: reduce each layer, fit its process, one factor of all.

Reduction of a layer's standardised features φ to Q ≤ 64 numbers x = φ U: the first axis is the direction of Bayesian
linear regression of the number, the others are principal components of what is left.  (The paper takes a layer as it
is; where its axes are of equal variance, as z's are, principal components alone would lose what predicts the number.)

Length-scales ℓ (one for each axis), signal s² and noise τ² minimise the Vecchia approximation of the NLL (Vecchia 1988)

    −log p(t) ≈ −Σ_i log N(t_i; μ_i, v_i + τ²)

with images in random order, μ_i and v_i given the m nearest *earlier* ones in length-scales; m = n − 1 makes it exact.
Adam follows it on random images; neighbours are found anew in every step.  Every :data:`CHECK` steps the NLL of the
selection split is measured, and the least one kept; after :data:`PATIENCE` checks without a new least the fit ends.

Factor: as in :mod:`.blr`, both variances of the whole ensemble are multiplied by the mean of ``(y − μ)²/σ²`` over the
selection split.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.numerics.features import FeatureMatrix, blocks
from psc_core.numerics.linalg import eigh, fix_signs
from psc_core.tasks.regression.fit.blr import fit_posterior, gaussian_nll, scaled
from psc_core.tasks.regression.fit.data import RegressionData
from psc_core.tasks.regression.heads.dve import IMAGES, DeepVecchiaHead, combine, condition, nearest_points

MAX_REDUCED: Final = 64
"""Maximum number of axes that a layer is reduced to."""

MAX_POINTS: Final = 50_000
"""Maximum number of training images that a head stores."""

NEIGHBOURS: Final = 32
"""m."""

STEPS: Final = 300
"""Maximum number of steps of Adam for each layer."""

CHECK: Final = 20
PATIENCE: Final = 3
BATCH: Final = 128
"""Number of images of a step."""

RATE: Final = 0.05
"""Learning rate of Adam; parameters are logarithms."""

CHECKED_IMAGES: Final = 1000
"""Maximum number of selection images that end the fit of a layer."""

LEAST_NOISE: Final = 1e-4
"""Minimum τ² where the numbers have deviation 1."""

RANGES: Final = ((-7.0, 7.0), (-7.0, 4.0), (-12.0, 1.0))
"""Bounds of the parameters of a :class:`GaussianProcess`, where the deviation of all axes together is 1."""


class GaussianProcess(NamedTuple):
    """The Gaussian process of one layer, by the logarithms of its parameters."""

    length: Float[Tensor, " reduced"]
    signal: Float[Tensor, ""]
    noise: Float[Tensor, ""]  # of τ² − LEAST_NOISE

    @property
    def variances(self) -> tuple[Tensor, Tensor]:
        """s² and τ²."""
        return self.signal.exp(), self.noise.exp() + LEAST_NOISE


def fit_dve(data: RegressionData) -> DeepVecchiaHead:
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
    mean, factor, nll = scaled(data, *predict(DeepVecchiaHead(tensors, record={}).to(device), data))
    return DeepVecchiaHead(
        {**tensors, "deviation_factor": torch.tensor(math.sqrt(factor))},
        record={
            "variance_factor": factor,
            "val_nll": nll + float(data.scale.log()),
            "val_rmse": float((data.selection_values - mean).square().mean().sqrt() * data.scale),
        },
    )


def predict(head: DeepVecchiaHead, data: RegressionData) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Return mean and whole variance of the selection images; numbers have deviation 1."""
    center, inverse_scale = data.standardisation
    parts = []
    for phi in torch.split(data.selection, IMAGES):
        experts = head.experts((phi / inverse_scale + center).float())
        parts.append(combine(experts.mean, experts.variance, head.signal, head.noise))
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
