"""Multinomial logistic regression: the maximum a posteriori weights that a head starts from.

Minimises, for one row φ_i with label y_i each,

    ``Σ_i −log softmax(W φ_i + b)_{y_i} + (τ / 2)(‖W‖² + ‖b‖²)``

by L-BFGS with strong-Wolfe line search from a fixed start: deterministic, no step size.  Weights and sums
are float64, matrix products are in the type of φ, in row chunks.  The prior precision τ is chosen by
validation NLL along a path from strong to weak, each fit starting from the last.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.heads.base import nll

PRECISIONS: Final = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1, 1e-2)
"""Prior precisions tried, strong to weak, for features of unit variance."""

ITERATIONS: Final = 200
"""Most L-BFGS iterations for one precision."""


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
    train: Float[Tensor, "n dim"],
    train_labels: Int[Tensor, " n"],
    val: Float[Tensor, "m dim"],
    val_labels: Int[Tensor, " m"],
    *,
    num_classes: int,
) -> SoftmaxFit:
    """Fit along :data:`PRECISIONS` until the validation NLL gets worse; return the best."""
    start = torch.zeros(num_classes, train.shape[1] + 1, dtype=torch.float64, device=train.device)
    best = SoftmaxFit(start[:, :-1], start[:, -1], math.inf, math.log(num_classes))
    for precision in PRECISIONS:
        weight, bias = fit_softmax(train, train_labels, precision=precision, start=start)
        logits = functional.linear(val, weight.to(val.dtype), bias.to(val.dtype))
        val_nll = nll(logits, val_labels).mean().item()
        if val_nll > best.val_nll and best.precision < math.inf:
            break
        best = SoftmaxFit(weight, bias, precision, val_nll)
        start = torch.cat([weight, bias[:, None]], dim=1)
    return best


def fit_softmax(
    features: Float[Tensor, "n dim"],
    labels: Int[Tensor, " n"],
    *,
    precision: float,
    start: Float[Tensor, "classes columns"],
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
    """Weights and bias for one prior precision, float64.

    Args:
        features: φ.
        labels: Class index of each row.
        precision: τ; must be positive, or the minimum may be at infinity.
        start: Initial ``[W b]``, one column more than ``features``.
    """
    theta = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [theta],
        max_iter=ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        loss, theta.grad = objective(theta.detach(), features, labels, precision=precision)
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
    solution = theta.detach()
    return solution[:, :-1], solution[:, -1]


def objective(
    theta: Float[Tensor, "classes columns"],
    features: Float[Tensor, "n dim"],
    labels: Int[Tensor, " n"],
    *,
    precision: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "classes columns"]]:
    """The module's objective divided by n, and its gradient ``[Σ (p − e_y) φᵀ, Σ (p − e_y)] + τ θ``."""
    weight, bias = theta[:, :-1].to(features.dtype), theta[:, -1].to(features.dtype)
    loss = 0.5 * precision * theta.square().sum()
    gradient = precision * theta
    for chunk in linalg.chunk_rows(len(features), features.shape[1] + len(theta)):
        rows, targets = features[chunk], labels[chunk, None]
        log_probabilities = functional.linear(rows, weight, bias).log_softmax(dim=1)
        loss -= log_probabilities.gather(1, targets).double().sum()
        residual = log_probabilities.exp_()
        residual.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=residual.dtype))
        gradient[:, :-1] += residual.T @ rows
        gradient[:, -1] += residual.double().sum(0)
    return loss / len(features), gradient / len(features)
