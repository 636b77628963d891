"""Multinomial logistic regression: the maximum a posteriori weights that a head starts from.

Minimises, for one row φ_i with label y_i each,

    ``Σ_i −log softmax(W φ_i + b)_{y_i} + (τ / 2)(‖W‖² + ‖b‖²)``

by L-BFGS with strong-Wolfe line search from a fixed start: deterministic, no step size.  Everything is float64,
in row chunks.  The prior precision τ is chosen by validation NLL along a path from strong to weak, each fit
starting from the last; the fit with the chosen one is then finished.

The variables are those in which the curvature at the start of a fit is near the identity, as far as a Kronecker
product can tell.  With ``φ̃ = (φ, 1)``, ``p`` the probabilities at the start, ``w = 1 − Σ_c p_c²``,

    ``A = Σ_i w_i φ̃_i φ̃_iᵀ / Σ_i w_i = Q_A diag(λ_A) Q_Aᵀ``
    ``B = (1/n) Σ_i (diag p_i − p_i p_iᵀ) = Q_B diag(λ_B) Q_Bᵀ``

they are ``V = √(λ_B λ_Aᵀ + τ/n) ∘ (Q_Bᵀ [W b] Q_A)`` (KFAC, Martens & Grosse 2015, with rows weighted by what they
contribute).  Where the rows are many and the weights few, the curvature itself takes the place of the product:
``V = Lᵀ vec [W b]`` with ``L Lᵀ = (1/n) Σ_i (diag p_i − p_i p_iᵀ) ⊗ φ̃_i φ̃_iᵀ + τ/n``, in a third of the iterations.
Both are measured on some :data:`CURVATURE_ROWS` rows; they change the way, not the minimum.  A
gradient entry in V is a distance to the minimum in units of which √(1/n) is the statistical error of the weights.
Without this, and with float32 sums, iterations end in a valley where the last digit of a feature moves a probability
by 10⁻³.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.heads.fit.posterior import nll
from psc_core.numerics import linalg
from psc_core.numerics.matrix import FeatureMatrix, as_matrix, blocks

PRECISIONS: Final = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1, 1e-2)
"""Prior precisions tried, strong to weak, for features of unit variance."""

ITERATIONS: Final = 200
"""Most L-BFGS iterations for one precision."""

PATH_TOLERANCE: Final = 1e-4
"""Largest gradient entry in V that ends a fit along the path of τ: its validation NLL is right to 10⁻⁴ nats."""

TOLERANCE: Final = 3e-7
"""The same for the chosen τ: its probabilities are right to about 10⁻⁵."""

PAIRS: Final = 20
"""Steps and gradients that L-BFGS remembers."""

CURVATURE_ROWS: Final = 8192
"""FeatureMatrix that A and B are measured on, unless the columns ask for more."""

CURVATURE_ROWS_PER_COLUMN: Final = 4

MOST_EXACT: Final = 2048
"""Weights and biases up to which the curvature is taken as it is (32 MiB), not as a Kronecker product."""

FEWEST_EXACT: Final = 4
"""FeatureMatrix, for each that the curvature is measured on, from which that saves more than it costs."""


class SoftmaxFit(NamedTuple):
    """A fitted multinomial logistic regression.

    Attributes:
        weight: W.
        bias: b.
        precision: τ of the prior.
        val_nll: Mean validation NLL, nats.
    """

    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]
    precision: float
    val_nll: float

    def theta(self) -> Float[Tensor, "classes columns"]:
        """``[W b]``."""
        return torch.cat([self.weight, self.bias[:, None]], dim=1)


def choose_softmax(
    train: Float[Tensor, "n dim"] | FeatureMatrix,
    train_labels: Int[Tensor, " n"],
    val: Float[Tensor, "m dim"],
    val_labels: Int[Tensor, " m"],
    *,
    num_classes: int,
    finish: bool = True,
) -> SoftmaxFit:
    """Fits along :data:`PRECISIONS` until the validation NLL gets worse; the best, finished unless told otherwise."""

    def fit(precision: float, start: Tensor, tolerance: float) -> SoftmaxFit:
        weight, bias = fit_softmax(train, train_labels, precision=precision, start=start, tolerance=tolerance)
        logits = functional.linear(val, weight.to(val.dtype), bias.to(val.dtype))
        return SoftmaxFit(weight, bias, precision, nll(logits, val_labels).mean().item())

    theta = torch.zeros(num_classes, train.shape[1] + 1, dtype=torch.float64, device=train.device)
    best = fit(PRECISIONS[0], theta, PATH_TOLERANCE)
    for precision in PRECISIONS[1:]:
        weaker = fit(precision, best.theta(), PATH_TOLERANCE)
        if weaker.val_nll > best.val_nll:
            break
        best = weaker
    return fit(best.precision, best.theta(), TOLERANCE) if finish else best


class KroneckerVariables(NamedTuple):
    """``V = scale ∘ (outputsᵀ θ inputs)`` for θ = [W b]: there, back, and for gradients with respect to θ."""

    outputs: Float[Tensor, "classes classes"]
    inputs: Float[Tensor, "columns columns"]
    scale: Float[Tensor, "classes columns"]

    def of(self, theta: Tensor) -> Tensor:
        return (self.outputs.T @ theta @ self.inputs) * self.scale

    def theta(self, v: Tensor) -> Tensor:
        return self.outputs @ (v / self.scale) @ self.inputs.T

    def gradient(self, gradient: Tensor) -> Tensor:
        return (self.outputs.T @ gradient @ self.inputs) / self.scale


class ExactVariables(NamedTuple):
    """``V = Lᵀ vec θ``, the same."""

    lower: Float[Tensor, "weights weights"]

    def of(self, theta: Tensor) -> Tensor:
        return (self.lower.T @ theta.flatten()).view_as(theta)

    def theta(self, v: Tensor) -> Tensor:
        return cast(Tensor, torch.linalg.solve_triangular(self.lower.T, v.reshape(-1, 1), upper=True)).view_as(v)

    def gradient(self, gradient: Tensor) -> Tensor:
        solved = cast(Tensor, torch.linalg.solve_triangular(self.lower, gradient.reshape(-1, 1), upper=False))
        return solved.view_as(gradient)


Variables = KroneckerVariables | ExactVariables


def variables_at(
    theta: Float[Tensor, "classes columns"], features: Float[Tensor, "n dim"] | FeatureMatrix, *, precision: float
) -> Variables:
    """The variables of the module's text for fits that start at ``theta``, float64."""
    n = len(features)
    count = min(n, max(CURVATURE_ROWS, CURVATURE_ROWS_PER_COLUMN * theta.shape[1]))
    # one row of each of as many equal parts, at random: rows may come in order, or again and again
    share = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample = as_matrix(features).take(((torch.arange(count) + share) * (n / count)).long().to(features.device))
    if theta.numel() <= MOST_EXACT and n >= FEWEST_EXACT * count:
        return ExactVariables(_curvature(theta, sample, precision / n))
    return _kronecker(theta, sample, precision / n)


def _blocks(
    theta: Float[Tensor, "classes columns"], sample: FeatureMatrix, columns: int
) -> Iterator[tuple[Float[Tensor, "m columns"], Float[Tensor, "m classes"]]]:
    """φ̃ and p of the rows, a block at a time."""
    for _, block in blocks(sample, columns=columns):
        rows = functional.pad(block.to(theta.dtype), (0, 1), value=1.0)
        yield rows, (rows @ theta.T).softmax(dim=1)


def _kronecker(theta: Float[Tensor, "classes columns"], sample: FeatureMatrix, ridge: float) -> KroneckerVariables:
    classes, columns = theta.shape
    inputs, outputs = theta.new_zeros(columns, columns), theta.new_zeros(classes, classes)
    for rows, p in _blocks(theta, sample, columns + classes):
        inputs += (rows * (1 - p.square().sum(1, keepdim=True))).T @ rows
        outputs += p.sum(0).diag() - p.T @ p
    b, a = linalg.eigh(outputs / len(sample)), linalg.eigh(inputs / outputs.trace())
    return KroneckerVariables(b.vectors, a.vectors, (torch.outer(b.values, a.values) + ridge).sqrt())


def _curvature(
    theta: Float[Tensor, "classes columns"], sample: FeatureMatrix, ridge: float
) -> Float[Tensor, "weights weights"]:
    """Cholesky factor of the curvature with ``ridge`` on its diagonal."""
    classes, columns = theta.shape
    total = theta.new_zeros(classes, columns, classes * columns)
    for rows, p in _blocks(theta, sample, 4 * columns):
        for c in range(classes):
            weights = p[:, c, None] * -p[:, : c + 1]
            weights[:, c] += p[:, c]
            total[c, :, : (c + 1) * columns] += rows.T @ (weights[:, :, None] * rows[:, None]).flatten(1)
    lower = total.view(classes * columns, -1).tril_() / len(sample)
    whole = lower + lower.tril(-1).T
    whole.diagonal().add_(ridge)
    return cast(Tensor, torch.linalg.cholesky(whole))


def fit_softmax(
    features: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    precision: float,
    start: Float[Tensor, "classes columns"],
    tolerance: float = TOLERANCE,
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
    """Weights and bias for one prior precision, float64.

    Args:
        features: φ.
        labels: Class index of each row.
        precision: τ; must be positive, or the minimum may be at infinity.
        start: Initial ``[W b]``, one column more than ``features``.
        tolerance: Largest gradient entry, in the variables of the module's text, that ends the iterations.
    """
    variables = variables_at(start, features, precision=precision)
    v = variables.of(start).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [v],
        max_iter=ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=tolerance**2,
        history_size=PAIRS,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        loss, gradient = objective(variables.theta(v.detach()), features, labels, precision=precision)
        v.grad = variables.gradient(gradient)
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
    solution = variables.theta(v.detach())
    return solution[:, :-1], solution[:, -1]


def objective(
    theta: Float[Tensor, "classes columns"],
    features: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    precision: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "classes columns"]]:
    """The module's objective divided by n, and its gradient ``[Σ (p − e_y) φᵀ, Σ (p − e_y)] + τ θ``."""
    weight, bias = theta[:, :-1], theta[:, -1]
    loss = 0.5 * precision * theta.square().sum()
    gradient = precision * theta
    for chunk, block in blocks(features, columns=features.shape[1] + len(theta)):
        rows, targets = block.to(theta.dtype), labels[chunk, None]
        log_probabilities = functional.linear(rows, weight, bias).log_softmax(dim=1)
        loss -= log_probabilities.gather(1, targets).sum()
        residual = log_probabilities.exp_()
        residual.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=residual.dtype))
        gradient[:, :-1] += residual.T @ rows
        gradient[:, -1] += residual.sum(0)
    return loss / len(features), gradient / len(features)
