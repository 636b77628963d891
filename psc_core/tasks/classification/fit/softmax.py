"""Multinomial logistic regression: the maximum a posteriori weights that a head starts from.

Minimises, over labelled examples with features φ_i and label y_i,

    ``Σ_i −log softmax(W φ_i + b)_{y_i} + (τ / 2)(‖W‖² + ‖b‖²)``

by L-BFGS with strong-Wolfe line search from a fixed start: deterministic, no step size.  Everything is float64,
in blocks of features.  The prior precision τ is chosen by selection NLL along a path from strong to weak, each fit
starting from the one before; the fit with the chosen one is then run to :data:`TOLERANCE`.

The iterations run in the variables V of :mod:`.preconditioning`, in which the curvature at the start is near the
identity.  A gradient entry in V is a distance to the minimum in units of which √(1/n) is the statistical error of the
weights.  Without this, and with float32 sums, iterations end in a valley where the last digit of a feature moves a
probability by 10⁻³.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.compute import track
from psc_core.numerics.features import FeatureMatrix, blocks
from psc_core.tasks.classification.fit.posterior import nll
from psc_core.tasks.classification.fit.preconditioning import variables_at

PRIOR_PRECISIONS: Final = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1, 1e-2)
"""Prior precisions to try, strong to weak, for features of unit variance."""

ITERATIONS: Final = 200
"""Maximum number of L-BFGS iterations for one precision."""

PATH_TOLERANCE: Final = 1e-4
"""Largest gradient entry in V that ends a fit along the path of τ: its selection NLL is accurate to 10⁻⁴ nats."""

TOLERANCE: Final = 3e-7
"""Largest gradient entry at the chosen τ: its probabilities are accurate to about 10⁻⁵."""

PAIRS: Final = 20
"""Number of steps and gradients that L-BFGS remembers."""


class SoftmaxFit(NamedTuple):
    """A fitted multinomial logistic regression."""

    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]
    prior_precision: float  # τ of the prior
    selection_nll: float  # mean selection NLL, nats

    def logits(self, features: Float[Tensor, "m dim"]) -> Float[Tensor, "m classes"]:
        """Return ``W φ + b``, in the type of the features."""
        return functional.linear(features, self.weight.to(features.dtype), self.bias.to(features.dtype))

    def theta(self) -> Float[Tensor, "classes columns"]:
        """``[W b]``."""
        return torch.cat([self.weight, self.bias[:, None]], dim=1)


def choose_softmax(
    train: Float[Tensor, "n dim"] | FeatureMatrix,
    train_labels: Int[Tensor, " n"],
    selection: Float[Tensor, "m dim"],
    selection_labels: Int[Tensor, " m"],
    *,
    num_classes: int,
    finish: bool = True,
) -> SoftmaxFit:
    """Return the best fit along :data:`PRIOR_PRECISIONS`, until the selection NLL rises.

    If ``finish``, it is finished, and the progress is reported: with many features, each fit takes minutes.
    """

    def fit(prior_precision: float, start: Tensor, tolerance: float) -> SoftmaxFit:
        weight, bias = fit_softmax(
            train, train_labels, prior_precision=prior_precision, start=start, tolerance=tolerance
        )
        logits = functional.linear(selection, weight.to(selection.dtype), bias.to(selection.dtype))
        return SoftmaxFit(weight, bias, prior_precision, nll(logits, selection_labels).mean().item())

    def walk() -> Iterator[SoftmaxFit]:
        """Yield the best fit so far after each fit."""
        theta = torch.zeros(num_classes, train.shape[1] + 1, dtype=torch.float64, device=train.device)
        best = fit(PRIOR_PRECISIONS[0], theta, PATH_TOLERANCE)
        for prior_precision in PRIOR_PRECISIONS[1:]:
            yield best
            weaker = fit(prior_precision, best.theta(), PATH_TOLERANCE)
            if weaker.selection_nll > best.selection_nll:
                break
            best = weaker
        yield best
        if finish:
            yield fit(best.prior_precision, best.theta(), TOLERANCE)

    fits = track(walk(), total=len(PRIOR_PRECISIONS) + 1, description="head") if finish else walk()
    return deque(fits, maxlen=1).pop()


def fit_softmax(
    features: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    prior_precision: float,
    start: Float[Tensor, "classes columns"],
    tolerance: float = TOLERANCE,
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
    """Fit weights and bias for one prior precision, float64.

    Args:
        features: φ.
        labels: Class index of each labelled example.
        prior_precision: τ; must be positive, or the minimum may be at infinity.
        start: Initial ``[W b]``, one column more than ``features``.
        tolerance: Largest gradient entry, in V, that ends the iterations.
    """
    variables = variables_at(start, features, prior_precision=prior_precision)
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
        loss, gradient = objective(variables.theta(v.detach()), features, labels, prior_precision=prior_precision)
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
    prior_precision: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "classes columns"]]:
    """Return the module's objective divided by n, and its gradient ``[Σ (p − e_y) φᵀ, Σ (p − e_y)] + τ θ``."""
    weight, bias = theta[:, :-1], theta[:, -1]
    loss = 0.5 * prior_precision * theta.square().sum()
    gradient = prior_precision * theta
    for chunk, block in blocks(features, columns=features.shape[1] + len(theta)):
        phi, targets = block.to(theta.dtype), labels[chunk, None]
        log_probabilities = functional.linear(phi, weight, bias).log_softmax(dim=1)
        loss -= log_probabilities.gather(1, targets).sum()
        residual = log_probabilities.exp_()
        residual.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=residual.dtype))
        gradient[:, :-1] += residual.T @ phi
        gradient[:, -1] += residual.sum(0)
    return loss / len(features), gradient / len(features)
