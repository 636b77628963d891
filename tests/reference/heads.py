"""Naive float64 twins of the heads of both tasks: dense posteriors, explicit Jacobians, loops."""

import math
import statistics

import torch
from scipy import optimize
from sklearn.gaussian_process.kernels import Matern
from torch import Tensor
from torch.nn import functional

from psc_core.heads.laplace import LaplaceHead


def softmax_objective(theta: Tensor, phi: Tensor, labels: Tensor, precision: float) -> Tensor:
    """Penalised mean NLL, differentiable by autograd."""
    nll = functional.cross_entropy(phi @ theta[:, :-1].T + theta[:, -1], labels, reduction="sum")
    return (nll + 0.5 * precision * theta.square().sum()) / len(phi)


def softmax_curvature(theta: Tensor, phi: Tensor, ridge: float, axes: Tensor | None = None) -> Tensor:
    """Dense curvature of the objective in ``θ.flatten()``, or a Kronecker product in its place, by loops.

    The input factor of the product keeps its variances along ``axes`` alone.
    """
    classes, columns = theta.shape
    whole, outputs = theta.new_zeros(theta.numel(), theta.numel()), theta.new_zeros(classes, classes)
    inputs, total = theta.new_zeros(columns, columns), 0.0
    for row in phi:
        augmented = torch.cat([row, row.new_ones(1)])
        p = (theta @ augmented).softmax(0)
        fisher, outer, weight = p.diag() - torch.outer(p, p), torch.outer(augmented, augmented), 1 - (p @ p).item()
        whole += torch.kron(fisher, outer) / len(phi)
        outputs += fisher / len(phi)
        inputs += weight * outer
        total += weight
    curvature = whole
    if axes is not None:
        along = torch.diag(torch.diag(axes.T @ (inputs / total) @ axes))
        curvature = torch.kron(outputs, axes @ along @ axes.T)
    return curvature + ridge * torch.eye(len(curvature), dtype=torch.float64)


def kfac_factors(weight: Tensor, bias: Tensor, phi: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
    """A and B by loops over labelled examples."""
    a = torch.zeros(phi.shape[1], phi.shape[1], dtype=torch.float64)
    b = torch.zeros(len(bias), len(bias), dtype=torch.float64)
    for row, share in zip(phi, weights, strict=True):
        p = (weight @ row + bias).softmax(0)
        a += share * torch.outer(row, row) / sum(weights)
        b += share * (torch.diag(p) - torch.outer(p, p))
    return a, b


def logit_covariance(a: Tensor, b: Tensor, precision: float, phi: Tensor) -> Tensor:
    """K × K covariance of the logits of one image from the dense posterior and the Jacobian."""
    classes, dim = len(b), len(a)
    weights = torch.linalg.inv(torch.kron(b, a) + precision * torch.eye(classes * dim, dtype=torch.float64))
    biases = torch.linalg.inv(b + precision * torch.eye(classes, dtype=torch.float64))
    jacobian = torch.kron(torch.eye(classes, dtype=torch.float64), phi[None])
    return jacobian @ weights @ jacobian.T + biases


def probit_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    """``softmax(μ / √(1 + π s² / 8))`` of one image."""
    return (mean / torch.sqrt(1 + math.pi * variance / 8)).softmax(0)


def entropy(probabilities: Tensor) -> float:
    """Shannon entropy of one distribution, nats."""
    return -sum(p * math.log(p) for p in probabilities.tolist() if p > 0)


def saturating_information(mean: Tensor, covariance: Tensor) -> float:
    """``H (1 − exp(−δ / H))`` with ``δ = ½ tr[(diag p − p pᵀ) V]`` and p from the centred logits."""
    centring = torch.eye(len(mean), dtype=torch.float64) - 1 / len(mean)
    probabilities = probit_probabilities(mean, (centring @ covariance @ centring).diag())
    fisher = torch.diag(probabilities) - torch.outer(probabilities, probabilities)
    total = entropy(probabilities)
    return 0.0 if total == 0 else total * (1 - math.exp(-0.5 * (fisher @ covariance).trace().item() / total))


def sampled(head: LaplaceHead, z: Tensor, samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Mean of the softmax over samples of the logits, and its mean entropy, from the head's stored tensors."""
    stored = {name: tensor.double() for name, tensor in head.state_dict().items()}
    phi = (z.double() - stored["center"]) * stored["inverse_scale"]
    mean = phi @ stored["weight"].T + stored["bias"]
    deviations = ((phi @ stored["input_vectors"]).square() @ stored["weight_spectrum"] + stored["bias_spectrum"]).sqrt()
    generator = torch.Generator().manual_seed(seed)
    probabilities, aleatoric = torch.zeros_like(mean), torch.zeros(len(z), dtype=torch.float64)
    for _ in range(samples):
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        drawn = (mean + (deviations * noise) @ stored["output_vectors"].T).softmax(dim=1)
        probabilities += drawn / samples
        aleatoric -= torch.special.xlogy(drawn, drawn).sum(1) / samples
    return probabilities, aleatoric


def random_feature_variance(psi_train: Tensor, p: Tensor, precision: float, psi: Tensor) -> float:
    """SNGP: ``ψᵀ (τ I + Σ p (1 − p) ψ ψᵀ)⁻¹ ψ`` of one image by a dense inverse."""
    total = precision * torch.eye(len(psi), dtype=torch.float64)
    for row, largest in zip(psi_train, p, strict=True):
        total += largest * (1 - largest) * torch.outer(row, row)
    return (psi @ torch.linalg.inv(total) @ psi).item()


def kernels(e: Tensor, centroids: Tensor, length_scale: float) -> Tensor:
    """DUQ: the kernel of one embedded image to each centroid."""
    squares = [(e - centroid).square().sum().item() for centroid in centroids]
    return torch.tensor([math.exp(-square / (2 * len(e) * length_scale**2)) for square in squares])


def standardise(z: Tensor) -> Tensor:
    """φ, column by column; a constant column is divided by the largest deviation."""
    columns = [column.double() for column in z.T]
    deviations = [(column - column.mean()).square().mean().sqrt().item() for column in columns]
    scales = [deviation if deviation > 1e-6 * max(deviations) else max(deviations) for deviation in deviations]
    return torch.stack([(column - column.mean()) / scale for column, scale in zip(columns, scales, strict=True)], 1)


def kernel_loss(kernels: Tensor, labels: Tensor) -> float:
    """DUQ's binary cross-entropy of every kernel, summed over classes, averaged over images."""
    hot = functional.one_hot(labels, kernels.shape[1]).double()
    return functional.binary_cross_entropy(kernels, hot, reduction="sum").item() / len(labels)


def length_scale(
    phi: Tensor, labels: Tensor, val: Tensor, val_labels: Tensor, omega: Tensor, phases: Tensor, precision: float
) -> float:
    """SNGP: 0.5, 1 or 2 times the median distance, by the validation NLL of a regression on the random features."""
    n, classes = len(phi), int(labels.max()) + 1
    distances = [(phi[i] - phi[j]).norm().item() for i in range(n) for j in range(i)]
    median = statistics.median_low([distance for distance in distances if distance > 0])
    losses = {}
    for scale in (0.5 * median, median, 2 * median):
        psi, psi_val = (math.sqrt(2) * torch.cos(part @ (omega / scale) + phases) for part in (phi, val))
        theta = torch.zeros(classes, psi.shape[1] + 1, dtype=torch.float64).requires_grad_()
        for _ in range(20):  # Newton
            loss = softmax_objective(theta, psi, labels, precision)
            (gradient,) = torch.autograd.grad(loss, theta)
            curvature = softmax_curvature(theta.detach(), psi, precision / n)
            step = torch.linalg.solve(curvature, gradient.flatten()).view_as(theta)
            theta = (theta - step).detach().requires_grad_()
        found = theta.detach()
        losses[scale] = functional.cross_entropy(psi_val @ found[:, :-1].T + found[:, -1], val_labels).item()
    return min(losses, key=losses.__getitem__)


def tempered_loss(mean: Tensor, variance: Tensor, temperature: float, labels: Tensor) -> float:
    """Mean NLL of the probit approximation of ``N(μ / T, s² / T²)``, one image at a time."""
    losses = []
    for f, v, label in zip(mean, variance.expand_as(mean), labels.tolist(), strict=True):
        losses.append(-probit_probabilities(f / temperature, v / temperature**2).log()[label].item())
    return statistics.mean(losses)


def choose_temperature(mean: Tensor, variance: Tensor, labels: Tensor) -> float:
    """By search in ever finer steps; a temperature other than 1 pays log(m) / 2 nats."""

    def loss(temperature: float) -> float:
        prior = 1 / temperature - 1 + math.log(temperature)
        return len(labels) * tempered_loss(mean, variance, temperature, labels) + prior

    bounds = math.log(0.01), math.log(100)
    found = optimize.minimize_scalar(lambda log: loss(math.exp(log)), bounds=bounds, options={"xatol": 1e-6})
    return math.exp(found.x) if found.fun + math.log(len(labels)) / 2 < loss(1.0) else 1.0


def choose_posterior(
    mean: Tensor, variances: dict[float, Tensor], labels: Tensor, share: float, nats: float
) -> tuple[float, float]:
    """The least precision, and its temperature, whose mean NLL is above the least by no more than a share or nats."""
    found = {}
    for precision, variance in variances.items():
        temperature = choose_temperature(mean, variance, labels)
        found[precision] = (tempered_loss(mean, variance, temperature, labels), temperature)
    least = min(loss for loss, _ in found.values())
    chosen = min(precision for precision, (loss, _) in found.items() if loss <= max((1 + share) * least, least + nats))
    return chosen, found[chosen][1]


def matern_covariance(x: Tensor, other: Tensor, signal: float) -> Tensor:
    """Matérn 5/2 of points in length-scales."""
    return signal * torch.from_numpy(Matern(nu=2.5)(x.double().numpy(), other.double().numpy()))


def exact_process_nll(x: Tensor, t: Tensor, signal: float, noise: float) -> float:
    """−log N(t; 0, K + τ² I) of all points together."""
    covariance = matern_covariance(x, x, signal) + noise * torch.eye(len(x), dtype=torch.float64)
    quadratic = (t.double() @ torch.linalg.inv(covariance) @ t.double()).item()
    return 0.5 * (quadratic + torch.logdet(covariance).item() + len(x) * math.log(2 * math.pi))


def process_given(x: Tensor, neighbours: Tensor, values: Tensor, signal: float, noise: float) -> tuple[float, float]:
    """Mean and variance of the process at one point given some others, by a dense inverse."""
    known = matern_covariance(neighbours, neighbours, signal) + noise * torch.eye(len(neighbours), dtype=torch.float64)
    across = matern_covariance(x[None], neighbours, signal)[0]
    weights = torch.linalg.inv(known) @ across
    return (weights @ values.double()).item(), signal - (weights @ across).item()


def nearest(x: Tensor, points: Tensor, m: int) -> list[int]:
    """Positions of the m nearest points, the nearest first."""
    return sorted(range(len(points)), key=lambda j: (points[j].double() - x.double()).norm().item())[:m]


def product_of_experts(
    means: list[float], variances: list[float], signals: list[float], noises: list[float]
) -> tuple[float, float, float, list[float]]:
    """Mean, variance, the noise's part of it, and the weights; ``variances`` include the noise."""
    learned = [max(0.0, 0.5 * math.log((s + n) / v)) + 1e-6 for s, n, v in zip(signals, noises, variances, strict=True)]
    beta = [each / sum(learned) for each in learned]
    precisions = [b / v for b, v in zip(beta, variances, strict=True)]
    variance = 1 / sum(precisions)
    mean = variance * sum(p * m for p, m in zip(precisions, means, strict=True))
    fractions = [n / v for n, v in zip(noises, variances, strict=True)]
    noise = variance * sum(p * f for p, f in zip(precisions, fractions, strict=True)) / sum(precisions)
    return mean, variance, noise, beta
