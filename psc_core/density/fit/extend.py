"""Extend a fitted density with more images of its classes, as if it had been fitted to them too.

The input is a density that was fitted to n labelled examples, and m more images; the output is a density of the same
kind.  In its coordinates w (:mod:`psc_core.density.gaussian`) a density keeps the mean μ_k and the covariance Σ_k of
each class, and in its constants the class proportions, which with n give n_k.  Moments need no more than that (Chan,
Golub & LeVeque 1983): m_k more images of class k, with the mean a_k, make

    ``B_k  = Σ_i (w_i − a_k)(w_i − a_k)ᵀ + n_k m_k / (n_k + m_k) (a_k − μ_k)(a_k − μ_k)ᵀ``
    ``μ'_k = μ_k + m_k / (n_k + m_k) (a_k − μ_k)``
    ``Σ'_k = ((n_k − 1) Σ_k + B_k) / (n_k + m_k − 1)``
    ``W'   = ((n − K) I + Σ_k B_k) / (n + m − K)``           pooled within classes: it was the identity

and in the same way the covariance of all images that ``rmd`` subtracts.  The new coordinates are
``w' = (w − δ) W'^(−1/2)``, δ the mean of all, so that the pooled covariance is the identity again.

An image that stands for t equal ones counts t times in all of them.

The result is the fit to all images, except for three things.  The principal components stay, and what they leave out is
not seen.  A covariance that was shrunk, because its images were few, is extended as it is; more images outweigh that in
time.  Where training images have several labels, n_k counts labelled examples in the degrees of freedom too.

Shapes: m images, K classes, D = dim of z, P = kept components.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.density.base import Density
from psc_core.density.gaussian import ClasswiseDensity, RelativeDensity, TiedDensity
from psc_core.errors import FitError
from psc_core.numerics import linalg

EXAMPLES: Final = "examples"
"""The entry of a density's record that holds n."""


class Extended(NamedTuple):
    """An extended density, and how its coordinates changed."""

    density: Density
    offset: Float[Tensor, " P"]  # δ, float64
    turn: Float[Tensor, "P P"]  # W'^(−1/2), float64

    def moved(self, w: Float[Tensor, "images P"]) -> Float[Tensor, "images P"]:
        """Return ``w'`` for coordinates ``w`` of the density before, in their type."""
        return ((w.double() - self.offset) @ self.turn).to(w.dtype)


class _Class(NamedTuple):
    """A class after more images of it, float64."""

    examples: Float[Tensor, ""]  # n_k + m_k
    mean: Float[Tensor, " P"]  # μ'_k
    added: Float[Tensor, "P P"]  # B_k


def can_extend(family: type[Density]) -> bool:
    """Return whether more images can extend a density: it has the tensors of one of these three, and so all moments."""
    return family.layout in (ClasswiseDensity.layout, TiedDensity.layout, RelativeDensity.layout)


def class_counts(density: Density, examples: int) -> Float[Tensor, " K"]:
    """Return n_k, whole numbers as float64: n times the class proportions that the density's constants hold."""
    return (examples * _log_proportions(density).softmax(0)).round().clamp(min=2)


def extend_density(
    density: Density, features: Float[Tensor, "m D"], labels: Int[Tensor, " m"], *, examples: int, times: int = 1
) -> Extended:
    """Return the density of the labelled examples that it was fitted to and of m ≥ 1 more images.

    Args:
        density: The density as it was fitted, or extended before.
        features: The features of the images that the density reads.
        labels: Class index of each image.
        examples: n, the number of labelled examples that it was fitted to.
        times: t, the number of equal images that each one stands for.

    Raises:
        FitError: If :func:`can_extend` refuses the density, features are not finite, or there are fewer than two
            examples of each class.
    """
    if not can_extend(type(density)):
        raise FitError(f"a density {density.kind!r} has tensors that more images cannot extend; fit it again")
    classes, m, device = len(density.constants), times * len(labels), density.basis.device
    if not features.isfinite().all():
        raise FitError("expected finite features of the images that extend the density; check the precision")
    if examples < 2 * classes:
        raise FitError(
            f"expected at least two labelled examples of each of {classes} classes, got {examples}; fit it again"
        )
    z, labels = features.double().to(device), labels.to(device)
    z = functional.normalize(z) if density.unit_length else z
    w, centres, counts = density.coordinates(z), density.get_buffer("centres"), class_counts(density, examples)
    merged = [_merge(counts[k], centres[k], w[labels == k], times) for k in range(classes)]
    n, identity = float(counts.sum()), torch.eye(w.shape[1], dtype=torch.float64, device=device)

    scatter = torch.stack([each.added for each in merged]).sum(0)
    within = linalg.inverse_root(((n - classes) * identity + scatter) / (n + m - classes))
    offset, turn = m / (n + m) * w.mean(0), within.root
    proportions = torch.stack([each.examples for each in merged]) / (n + m)
    tensors = {
        "mean": density.mean + m / (n + m) * (z.mean(0) - density.mean),
        "basis": density.basis @ turn,
        "centres": (torch.stack([each.mean for each in merged]) - offset) @ turn,
        "constants": _log_proportions(density).logsumexp(0) + proportions.log() - 0.5 * within.log_det,
    }
    record = {**density.record, EXAMPLES: int(n) + m, "clamped_eigenvalues": within.n_clamped}
    if isinstance(density, ClasswiseDensity):
        roots = [
            linalg.inverse_root(turn @ ((seen - 1) * covariance + each.added) @ turn / (each.examples - 1))
            for seen, covariance, each in zip(counts, _covariances(density), merged, strict=True)
        ]
        tensors["whiteners"] = torch.stack([each.root for each in roots])
        tensors["constants"] -= 0.5 * tensors["constants"].new_tensor([each.log_det for each in roots])
        record["clamped_eigenvalues"] += sum(each.n_clamped for each in roots)
    if isinstance(density, RelativeDensity):
        whitener = density.background.double()
        before = torch.linalg.inv(whitener @ whitener.T)
        total = _merge(counts.sum(), torch.zeros_like(offset), w, times)  # w is centred on the mean of all
        after = turn @ ((n - 1) * before + total.added) @ turn / (n + m - 1)
        tensors["background"] = torch.linalg.inv(torch.linalg.cholesky(after)).T
        change = torch.linalg.slogdet(after)[1] + within.log_det - torch.linalg.slogdet(before)[1]
        tensors["background_constant"] = density.background_constant - 0.5 * change
    return Extended(type(density)(tensors, record=record).to(device), offset, turn)


def _merge(
    examples: Float[Tensor, ""], mean: Float[Tensor, " P"], more: Float[Tensor, "images P"], times: int
) -> _Class:
    """Merge a class with more images of it, each counted ``times`` times; there may be none."""
    if not len(more):
        return _Class(examples, mean, mean.new_zeros(len(mean), len(mean)))
    new, count = more.mean(0), times * len(more)
    gap, weight = new - mean, count / (examples + count)
    added = times * linalg.scatter_about(more, new) + examples * weight * gap.outer(gap)
    return _Class(examples + count, mean + weight * gap, added)


def _covariances(density: ClasswiseDensity) -> Float[Tensor, "K P P"]:
    """Return Σ_k, from its inverse square root."""
    inverse: Tensor = torch.linalg.inv(density.whiteners.double())
    return inverse @ inverse.mT


def _log_proportions(density: Density) -> Float[Tensor, " K"]:
    """Return log n_k / n plus a constant that is the same for every class, the volume of the coordinates."""
    constants = density.constants.double()
    if isinstance(density, ClasswiseDensity):
        constants = constants - torch.linalg.slogdet(density.whiteners.double())[1]  # −½ log det Σ_k
    return constants
