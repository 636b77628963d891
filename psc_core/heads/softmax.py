"""Multinomial logistic regression: the maximum a posteriori weights that a head starts from.

Minimises, for one row φ_i with label y_i each,

    ``Σ_i −log softmax(W φ_i + b)_{y_i} + (τ / 2)(‖W‖² + ‖b‖²)``

by L-BFGS with strong-Wolfe line search from a fixed start: deterministic, no step size.  Everything is float64,
in row chunks.  The prior precision τ is chosen by validation NLL along a path from strong to weak, each fit
starting from the last; the fit with the chosen one is then finished.

The variables are ``W R⁻¹`` with ``R = (½ ΦᵀΦ / n + τ / n)^(−1/2)``, an upper bound of the curvature (Böhning 1992):
in them no direction is flat.  Without this, and with float32 sums, iterations end in a valley where the last digit
of a feature moves a probability by 10⁻³.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.heads.base import nll
from psc_core.rows import Rows

PRECISIONS: Final = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1, 1e-2)
"""Prior precisions tried, strong to weak, for features of unit variance."""

ITERATIONS: Final = 200
"""Most L-BFGS iterations for one precision."""

PATH_TOLERANCE: Final = 1e-6
TOLERANCE: Final = 1e-7
"""Largest gradient entry that ends a fit: along the path of τ, and of the chosen one."""


class SoftmaxFit(NamedTuple):
    """Attributes:
    weight: W.
    bias: b.
    precision: τ of the prior.
    val_nll: Mean validation NLL, nats.
    """

    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]
    precision: float
    val_nll: float


def choose_softmax(
    train: Float[Tensor, "n dim"] | Rows,
    train_labels: Int[Tensor, " n"],
    val: Float[Tensor, "m dim"],
    val_labels: Int[Tensor, " m"],
    *,
    num_classes: int,
) -> SoftmaxFit:
    """Fit along :data:`PRECISIONS` until the validation NLL gets worse; finish and return the best."""
    start = torch.zeros(num_classes, train.shape[1] + 1, dtype=torch.float64, device=train.device)
    axes = principal_axes(train)

    def fit(precision: float, start: Tensor, tolerance: float) -> tuple[SoftmaxFit, Tensor]:
        weight, bias = fit_softmax(
            train, train_labels, precision=precision, start=start, axes=axes, tolerance=tolerance
        )
        logits = functional.linear(val, weight.to(val.dtype), bias.to(val.dtype))
        val_nll = nll(logits, val_labels).mean().item()
        return SoftmaxFit(weight, bias, precision, val_nll), torch.cat([weight, bias[:, None]], dim=1)

    best, solution = fit(PRECISIONS[0], start, PATH_TOLERANCE)
    for precision in PRECISIONS[1:]:
        weaker, start = fit(precision, solution, PATH_TOLERANCE)
        if weaker.val_nll > best.val_nll:
            break
        best, solution = weaker, start
    return fit(best.precision, solution, TOLERANCE)[0]


def principal_axes(features: Float[Tensor, "n dim"] | Rows) -> linalg.Eigen:
    """Eigendecomposition of ``ΦᵀΦ / n``, float64."""
    return linalg.eigh(
        linalg.scatter_about(features, torch.zeros(features.shape[1], device=features.device)) / len(features)
    )


def fit_softmax(
    features: Float[Tensor, "n dim"] | Rows,
    labels: Int[Tensor, " n"],
    *,
    precision: float,
    start: Float[Tensor, "classes columns"],
    axes: linalg.Eigen | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
    """Weights and bias for one prior precision, float64.

    Args:
        features: φ.
        labels: Class index of each row.
        precision: τ; must be positive, or the minimum may be at infinity.
        start: Initial ``[W b]``, one column more than ``features``.
        axes: :func:`principal_axes` of ``features``, where several fits share them.
        tolerance: Largest gradient entry, in the variables of the module's text, that ends the iterations.
    """
    axes = axes or principal_axes(features)
    curvature = (0.5 * axes.values + precision / len(features)).sqrt()
    root, inverse = axes.vectors / curvature, axes.vectors * curvature
    variables = torch.cat([start[:, :-1] @ inverse, start[:, -1:]], dim=1).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [variables],
        max_iter=ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=tolerance**2,
        line_search_fn="strong_wolfe",
    )

    def theta() -> Tensor:
        now = variables.detach()
        return torch.cat([now[:, :-1] @ root.T, now[:, -1:]], dim=1)

    def closure() -> Tensor:
        loss, gradient = objective(theta(), features, labels, precision=precision)
        variables.grad = torch.cat([gradient[:, :-1] @ root, gradient[:, -1:]], dim=1)
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
    solution = theta()
    return solution[:, :-1], solution[:, -1]


def objective(
    theta: Float[Tensor, "classes columns"],
    features: Float[Tensor, "n dim"] | Rows,
    labels: Int[Tensor, " n"],
    *,
    precision: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "classes columns"]]:
    """The module's objective divided by n, and its gradient ``[Σ (p − e_y) φᵀ, Σ (p − e_y)] + τ θ``."""
    weight, bias = theta[:, :-1], theta[:, -1]
    loss = 0.5 * precision * theta.square().sum()
    gradient = precision * theta
    for chunk, block in linalg.blocks(features, columns=features.shape[1] + len(theta)):
        rows, targets = block.to(theta.dtype), labels[chunk, None]
        log_probabilities = functional.linear(rows, weight, bias).log_softmax(dim=1)
        loss -= log_probabilities.gather(1, targets).sum()
        residual = log_probabilities.exp_()
        residual.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=residual.dtype))
        gradient[:, :-1] += residual.T @ rows
        gradient[:, -1] += residual.sum(0)
    return loss / len(features), gradient / len(features)
