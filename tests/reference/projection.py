"""Naive float64 twins of moments, Tucker sizes and the projection: loops, no prefix sums, no streaming."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (C, d) and covariance (C, d, d) of x (n, C, d), one entry at a time."""
    mean = x.double().mean(0)
    gaps = x.double() - mean
    return mean, torch.stack([sum(torch.outer(gap, gap) for gap in channel) / len(x) for channel in gaps.unbind(1)])


def tucker(tensor: Tensor, c: int, d: int, iterations: int) -> tuple[Tensor, Tensor]:
    """A and B by higher-order orthogonal iteration: leading singular vectors of each unfolding, others projected."""
    r = tensor.numpy()

    def leading(part: npt.NDArray[np.float64], mode: int, count: int) -> npt.NDArray[np.float64]:
        unfolded = np.moveaxis(part, mode, 0).reshape(part.shape[mode], -1)
        return np.linalg.svd(unfolded, full_matrices=False)[0][:, :count]

    a, left, right = leading(r, 0, c), leading(r, 1, d), leading(r, 2, d)
    for _ in range(iterations):
        a = leading(np.einsum("cde,dq,er->cqr", r, left, right), 0, c)
        left = leading(np.einsum("cde,cp,er->pdr", r, a, right), 1, d)
        right = leading(np.einsum("cde,cp,dq->pqe", r, a, left), 2, d)
    return torch.from_numpy(a), torch.from_numpy(left)


def nc1(z: Tensor, labels: Tensor) -> float:
    """Tr Σ_W / Tr Σ_T about class means and the mean of class means."""
    z = z.double().flatten(1)
    classes = sorted(set(labels.tolist()))
    means = {c: z[labels == c].mean(0) for c in classes}
    centre = torch.stack([means[c] for c in classes]).mean(0)
    within = sum(float((row - means[c]).square().sum()) for row, c in zip(z, labels.tolist(), strict=True))
    total = sum(float((row - centre).square().sum()) for row in z)
    return within / total


def nc4(z: Tensor, labels: Tensor, means: Tensor) -> float:
    """Fraction of labelled examples whose nearest class mean is their own."""
    hits = 0
    for row, label in zip(z.double().flatten(1), labels.tolist(), strict=True):
        distances = [float((row - mean).square().sum()) for mean in means.double().flatten(1)]
        hits += distances.index(min(distances)) == label
    return hits / len(z)


def project(x: Tensor, mean: Tensor, std: Tensor, a: Tensor, b: Tensor, z_mean: Tensor, z_std: Tensor) -> Tensor:
    """Algorithm 1, one image and one entry at a time."""
    outputs = []
    for image in x.double():
        scaled = (image - mean.double()) / std.double()
        z = [torch.einsum("cj,c,j->", scaled, p, q) for p in a.double().T for q in b.double().T]
        outputs.append((torch.stack(z) - z_mean.double()) / z_std.double())
    return torch.stack(outputs)


def smallest_size(
    nc1: Tensor, nc4: Tensor, epsilon: float, reference: float, tolerance: float, much: float
) -> tuple[int, int]:
    """(c, d) by trying every size; without one that passes, the best NC4 among those with NC1 > ε, or among all.

    Where that loses ``much`` of what others keep, the smallest of those that keep it within ``tolerance``.
    """
    sizes = [(c, d) for c in range(1, nc1.shape[0] + 1) for d in range(1, nc1.shape[1] + 1)]

    def value(matrix: Tensor, size: tuple[int, int]) -> float:
        return float(matrix[size[0] - 1, size[1] - 1])

    above = [size for size in sizes if value(nc1, size) > epsilon]
    passing = [size for size in above if value(nc4, size) >= reference - tolerance]
    if passing:
        return min(passing, key=lambda size: (size[0] * size[1], -value(nc4, size)))
    best = min(above or sizes, key=lambda size: (-value(nc4, size), size[0] * size[1]))
    most = min(reference, max(value(nc4, size) for size in sizes))
    if most - value(nc4, best) <= much:
        return best
    keeping = [size for size in sizes if value(nc4, size) >= most - tolerance]
    return min(keeping, key=lambda size: (size[0] * size[1], -value(nc4, size)))
