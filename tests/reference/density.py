"""Naive float64 twins of :mod:`psc_core.density`: dense inverses, one image and one class at a time.

Everything is in the coordinates ``y = (z − mean) U`` of the definition (no whitening), and shrinkage is
written without coordinates: ``(1 − ρ) S + ρ t T`` for a target covariance T, with ``t = tr(T⁻¹S) / P``.
"""

import math

import torch
from torch import Tensor

BACKGROUND = {"rmd": 1.0, "pooled++": 0.5}  # The weight of one Gaussian for all images, which is subtracted.


def principal_components(
    z: Tensor, kept: int | None, limit: int, minimum: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, components and variances by SVD; by default 99 % of the variance, or all above the minimum."""
    mean = z.mean(0)
    _, singular, right = torch.linalg.svd(z - mean, full_matrices=False)
    variances = singular**2 / (len(z) - 1)
    if kept is None:
        kept, total = 1, 0.0
        for k in range(len(variances)):
            total += variances[k].item()
            if total >= 0.99 * variances.sum().item():
                kept = k + 1
                break
        if minimum is not None:
            kept = sum(v > minimum * float(variances[0]) for v in variances.tolist())
        kept = max(1, min(kept, limit))
    return mean, right[:kept].T, variances[:kept]


def shrunk(sample: Tensor, target: Tensor, degrees_of_freedom: int) -> Tensor:
    """OAS towards a multiple of ``target`` where there are fewer than ten samples for each dimension."""
    d = len(sample)
    if degrees_of_freedom >= 10 * d:
        return sample
    relative = torch.linalg.inv(target) @ sample
    trace, square = relative.trace().item(), (relative @ relative).trace().item()
    pull, spread = (1 - 2 / d) * square + trace**2, (degrees_of_freedom + 1 - 2 / d) * (square - trace**2 / d)
    rho = 1.0 if spread <= 0 else min(1.0, pull / spread)
    return (1 - rho) * sample + rho * (trace / d) * target


def squared_distance(y: Tensor, mean: Tensor, covariance: Tensor) -> float:
    difference = y - mean
    return (difference @ torch.linalg.inv(covariance) @ difference).item()


def log_normal(y: Tensor, mean: Tensor, covariance: Tensor, limit: float = math.inf) -> float:
    """``log N(y; mean, covariance)``, with a squared distance of at most ``limit``."""
    squared = min(limit, squared_distance(y, mean, covariance))
    return -0.5 * (squared + torch.logdet(covariance).item() + len(y) * math.log(2 * math.pi))


def class_log_joint(
    train: Tensor, labels: Tensor, z: Tensor, *, kind: str, pca: int | None, images: Tensor | None = None
) -> Tensor:
    """``log π_k + log N_k`` of every entry of ``z``, minus the background of ``rmd`` and ``pooled++``.

    A covariance is the mean square over labelled examples times m / (m − 1) for its m images, m / (m − K) for all.
    """
    shown = list(range(len(train))) if images is None else images.tolist()
    train, z = train.double(), z.double()
    if kind in ("gda++", "mahalanobis++", "pooled++"):
        train, z = (part / part.norm(dim=1, keepdim=True) for part in (train, z))
    classes = int(labels.max()) + 1
    owners = [
        {image for image, label in zip(shown, labels.tolist(), strict=True) if label == k} for k in range(classes)
    ]
    counts = [int((labels == k).sum()) for k in range(classes)]
    limit = len(set(shown)) - classes
    mean, components, variances = principal_components(train, pca, limit, 1e-6 if kind == "pooled++" else None)
    y_train, y = (train - mean) @ components, (z - mean) @ components
    parts = [y_train[labels == k] for k in range(classes)]
    means = [part.mean(0) for part in parts]
    scatters = [(part - m).T @ (part - m) for part, m in zip(parts, means, strict=True)]
    total = torch.diag(variances)
    degrees_of_freedom = len(set(shown)) - classes
    mean_square = sum(scatters, torch.zeros_like(total)) / len(train)
    pooled = shrunk(mean_square * len(set(shown)) / degrees_of_freedom, total, degrees_of_freedom)
    if kind in ("tied", "mahalanobis++", "rmd"):
        covariances = [pooled] * classes
    else:
        covariances = []
        for scatter, n, own in zip(scatters, counts, owners, strict=True):
            covariances.append(shrunk(scatter / n * len(own) / (len(own) - 1), pooled, len(own) - 1))
    joint = torch.empty(len(y), classes, dtype=torch.float64)
    centre, limit = torch.zeros_like(means[0]), math.inf
    if kind == "pooled++":
        limit = sorted(squared_distance(each, centre, total) for each in y_train)[math.ceil(0.99 * len(y_train)) - 1]
    for i in range(len(y)):
        background = BACKGROUND.get(kind, 0.0) * log_normal(y[i], centre, total, limit)
        for k in range(classes):
            own = log_normal(y[i], means[k], covariances[k])
            joint[i, k] = math.log(counts[k] / len(train)) + own - background
    return joint


def extended_log_joint(
    counts: list[int], means: Tensor, covariances: Tensor, pooled: bool, more: Tensor, labels: Tensor, w: Tensor
) -> Tensor:
    """``log π_k + log N_k`` (no background) at ``w`` after images were added one at a time.

    With n images of a class, the next one moves its mean by ``(x − μ) / (n + 1)`` and adds
    ``n / (n + 1) (x − μ)(x − μ)ᵀ`` to its scatter (Welford 1962); no matrix is whitened.
    """
    classes = len(counts)
    n, means = list(counts), [mean.clone() for mean in means]
    freedom = [sum(n) - classes] if pooled else [count - 1 for count in n]
    scatters = [covariances[i] * freedom[i] for i in range(len(freedom))]
    for x, k in zip(more, labels.tolist(), strict=True):
        at, gap = 0 if pooled else k, x - means[k]
        scatters[at] = scatters[at] + n[k] / (n[k] + 1) * torch.outer(gap, gap)
        freedom[at] += 1
        means[k] = means[k] + gap / (n[k] + 1)
        n[k] += 1
    joint = torch.empty(len(w), classes, dtype=torch.float64)
    for i in range(len(w)):
        for k in range(classes):
            at = 0 if pooled else k
            joint[i, k] = math.log(n[k] / sum(n)) + log_normal(w[i], means[k], scatters[at] / freedom[at])
    return joint
