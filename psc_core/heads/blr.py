"""Bayesian linear regression on z: a mean, a noise that may depend on the image, and what the weights leave unknown.

    y = b + wᵀφ + ε,   ε ~ N(0, σ²(φ)),   log σ²(φ) = c + vᵀφ
    w ~ N(m, A⁻¹),   A = β ΦᵀΦ + α I,   b ~ N(ȳ, 1/(β n))            (Bishop 2006, equations 3.53 and 3.54)
    mean = ȳ + mᵀφ,   aleatoric = σ(φ),   epistemic = √(φᵀA⁻¹φ + 1/(β n))

φ are standardised features, n training images.  ``log σ²`` is kept within the range that it has on training images,
because nothing is known of the noise beyond.  Everything stored is in the target's unit.

The fit works on standardised numbers t, so the intercept is 0.  Weights, α and β follow by evidence, with
``ΦᵀΦ = V diag(e) Vᵀ``, until nothing changes (MacKay 1992; Bishop 2006, equations 3.92 to 3.95):

    m = β A⁻¹ Φᵀt,   γ = Σ_j β e_j / (β e_j + α),   α ← γ / ‖m‖²,   β ← (n − 1 − γ) / Σ_i (t_i − mᵀφ_i)²

Noise: v and c minimise ``½ Σ_i (r_i² exp(−s_i) + s_i) + ½ λ ‖v‖²``, s = c + vᵀφ, the NLL of residuals of mean 0 (a
gamma regression with logarithmic link), by Fisher scoring.  r_i are residuals as if image i had not been fitted,
``(t_i − mᵀφ_i) / (1 − β φ_iᵀA⁻¹φ_i)``.  λ, or the same noise for all images, has the smallest selection NLL.

Factor: both variances are multiplied by the mean of ``(y − mean)² / (aleatoric² + epistemic²)`` over selection images,
which minimises their NLL.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from psc_core.features import FeatureMatrix, blocks
from psc_core.fitted import Record
from psc_core.heads.base import RegressionData, RegressionHead, RegressionOutput, in_memory
from psc_core.linalg import Eigen, eigh


class BayesianLinearHead(RegressionHead):
    """The posterior described above, served in float32.

    ``root`` (D, D) is a square root of A⁻¹, ``R Rᵀ = A⁻¹``, and ``bias_deviation`` is ``1/√(β n)``.
    """

    kind = "blr"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "weight": ("dim",),
        "bias": (),
        "root": ("dim", "dim"),
        "bias_deviation": (),
        "noise_weight": ("dim",),
        "noise_bias": (),
        "log_noise_range": ("two",),
    }

    @classmethod
    def fit(cls, data: RegressionData) -> BayesianLinearHead:
        """Fit posterior, noise, and the factor of both standard deviations."""
        posterior = fit_posterior(data.train, data.train_values)
        noise = fit_noise(data, posterior)
        bias_deviation = 1 / math.sqrt(posterior.noise_precision * posterior.images)
        mean, factor, nll = scale_posterior(data, *predict(data, posterior, noise))
        unit = data.scale * math.sqrt(factor)
        shift = 2 * unit.log()
        return cls(
            {
                **data.standardisation._asdict(),
                "weight": posterior.mean * data.scale,
                "bias": data.center,
                "root": posterior.root * unit,
                "bias_deviation": unit * bias_deviation,
                "noise_weight": noise.weight,
                "noise_bias": noise.bias + shift,
                "log_noise_range": noise.range + shift,
            },
            record={
                "prior_precision": posterior.prior_precision,
                "noise_precision": posterior.noise_precision,
                "noise_penalty": noise.penalty if math.isfinite(noise.penalty) else -1,
                **selection_record(data, mean, factor, nll),
            },
        )

    def forward(self, z: Float[Tensor, "batch dim"]) -> RegressionOutput:
        phi = self.standardise(z)
        linear = functional.linear(phi, torch.stack([self.weight, self.noise_weight]))
        log_noise = (linear[:, 1] + self.noise_bias).clamp(self.log_noise_range[0], self.log_noise_range[1])
        variance = (phi @ self.root).square().sum(1) + self.bias_deviation.square()
        return RegressionOutput(linear[:, 0] + self.bias, (0.5 * log_noise).exp(), variance.sqrt())


LARGEST_PRECISION: Final = 1e8  # of α and β: an exact fit makes β infinite, useless features α
PENALTIES: Final = (0.001, 0.01, 0.1, 1.0)  # values of λ to try, relative to the number of images
NOISE_IMAGES: Final = 20_000  # maximum number of training images that the noise is fitted on


class LinearPosterior(NamedTuple):
    """The posterior of the weights; numbers have deviation 1."""

    mean: Float[Tensor, " dim"]  # m
    prior_precision: float  # α
    noise_precision: float  # β
    spectrum: Eigen  # of ΦᵀΦ
    images: int

    @property
    def root(self) -> Float[Tensor, "dim dim"]:
        """R with R Rᵀ = A⁻¹."""
        values, vectors = self.spectrum
        return vectors * (self.noise_precision * values + self.prior_precision).rsqrt()


class Noise(NamedTuple):
    """log σ² = bias + weightᵀφ within its range on training images, and its penalty; ∞ for the same noise for all."""

    weight: Float[Tensor, " dim"]
    bias: Float[Tensor, ""]
    range: Float[Tensor, " two"]
    penalty: float

    def variance(self, phi: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
        """Return σ²."""
        return (phi @ self.weight + self.bias).clamp(self.range[0], self.range[1]).exp()


def fit_posterior(phi: Float[Tensor, "n dim"] | FeatureMatrix, t: Float[Tensor, " n"]) -> LinearPosterior:
    """Fit weights, α and β by evidence; φ and t have mean 0."""
    gram = torch.zeros(phi.shape[1], phi.shape[1], dtype=torch.float64, device=t.device)
    moment = gram.new_zeros(len(gram))
    for chunk, block in blocks(phi):
        gram.addmm_(block.T, block)
        moment += block.T @ t[chunk]
    spectrum = eigh(gram)
    values, vectors = spectrum
    rotated, n, square = vectors.T @ moment, len(t), float(t.square().sum())
    alpha = beta = 1.0
    for _ in range(1000):
        before = alpha, beta
        weight = beta * rotated / (beta * values + alpha)
        gamma = float((beta * values / (beta * values + alpha)).sum())
        left = max(0.0, square - 2 * float(weight @ rotated) + float(weight.square() @ values))
        alpha = _precision(gamma, float(weight.square().sum()))
        beta = _precision(max(n - 1 - gamma, 1.0), left)
        if all(abs(math.log(new / old)) < 1e-6 for new, old in zip((alpha, beta), before, strict=True)):
            break
    weight = vectors @ (beta * rotated / (beta * values + alpha))
    return LinearPosterior(weight, alpha, beta, spectrum, n)


def _precision(count: float, squares: float) -> float:
    """Return ``count / squares``, from 1/:data:`LARGEST_PRECISION` to that."""
    largest = LARGEST_PRECISION
    return min(max(count / squares, 1 / largest), largest) if squares * largest > count else largest


def fit_noise(data: RegressionData, posterior: LinearPosterior) -> Noise:
    """Return the noise of the smallest selection NLL."""
    generator = torch.Generator().manual_seed(data.seed)
    chosen = torch.randperm(len(data.train), generator=generator)[:NOISE_IMAGES].sort().values
    chosen = chosen.to(data.train_values.device)
    phi = in_memory(data.train.take(chosen)).double()
    leverage = posterior.noise_precision * (phi @ posterior.root).square().sum(1)
    residual = (data.train_values[chosen] - phi @ posterior.mean) / (1 - leverage).clamp(min=0.01)
    squares = residual.square().clamp(min=1 / LARGEST_PRECISION)
    same = squares.mean().log()
    options = [Noise(torch.zeros_like(posterior.mean), same, torch.stack([same, same]), math.inf)]
    options += [fit_log_variance(phi, squares, penalty) for penalty in PENALTIES]
    return min(options, key=lambda noise: scale_posterior(data, *predict(data, posterior, noise))[2])


def fit_log_variance(phi: Float[Tensor, "n dim"], squares: Float[Tensor, " n"], penalty: float) -> Noise:
    """Fit the gamma regression described above; ``penalty`` is λ / n, and steps that do not help are halved."""
    n, dim = phi.shape
    design = torch.cat([phi, torch.ones_like(squares)[:, None]], dim=1)
    ridge = torch.full((dim + 1,), n * penalty, dtype=torch.float64, device=phi.device)
    ridge[-1] = 0.0
    factor = torch.linalg.cholesky(0.5 * design.T @ design + torch.diag(ridge + 1e-9 * n))
    at = torch.zeros_like(ridge)
    at[-1] = squares.mean().log()

    def loss(weight: Tensor) -> float:
        s = design @ weight
        return float(0.5 * (squares * (-s).exp() + s).sum() + 0.5 * (ridge * weight.square()).sum())

    best = loss(at)
    for _ in range(100):
        gradient = 0.5 * design.T @ (1 - squares * (-(design @ at)).exp()) + ridge * at
        step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        size = 1.0
        while size > 1e-4 and not loss(at - size * step) < best:
            size /= 2
        if size <= 1e-4:
            break
        at = at - size * step
        before, best = best, loss(at)
        if before - best < 1e-9 * n:
            break
    s = design @ at
    return Noise(at[:-1], at[-1], torch.stack([s.min(), s.max()]), penalty)


def predict(
    data: RegressionData, posterior: LinearPosterior, noise: Noise
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Return mean and whole variance of the selection images; numbers have deviation 1."""
    epistemic = (data.selection @ posterior.root).square().sum(1) + 1 / (posterior.noise_precision * posterior.images)
    return data.selection @ posterior.mean, noise.variance(data.selection) + epistemic


def scale_posterior(
    data: RegressionData, mean: Float[Tensor, " m"], variance: Float[Tensor, " m"]
) -> tuple[Float[Tensor, " m"], float, float]:
    """Return the mean that is served, the factor that makes its errors as large as stated, and the NLL with it, nats.

    The factor, by which all variances are multiplied, is the mean of (y − μ)²/σ² over the selection images.
    """
    served = mean if data.selection_mean is None else data.selection_mean
    factor = ((data.selection_values - served).square() / variance).mean().clamp(min=1 / LARGEST_PRECISION)
    return served, float(factor), gaussian_nll(data.selection_values, served, factor * variance)


def selection_record(data: RegressionData, mean: Float[Tensor, " m"], factor: float, nll: float) -> Record:
    """Return the entries of a head's record that say how well it predicts the selection split, in the target's unit."""
    return {
        "variance_factor": factor,
        "val_nll": nll + float(data.scale.log()),
        "val_rmse": float((data.selection_values - mean).square().mean().sqrt() * data.scale),
    }


def gaussian_nll(y: Float[Tensor, " n"], mean: Float[Tensor, " n"], variance: Float[Tensor, " n"]) -> float:
    """Return the mean NLL of numbers under normal distributions, nats."""
    return float(0.5 * (((y - mean).square() / variance) + variance.log() + math.log(2 * math.pi)).mean())
