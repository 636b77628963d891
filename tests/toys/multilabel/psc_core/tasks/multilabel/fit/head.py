"""Fit the heads of a model of several labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from psc_core.tasks.fit.standardisation import fit_standardisation
from psc_core.tasks.multilabel.heads.base import MultilabelHead
from psc_core.tasks.multilabel.heads.logistic import LogisticHead

PRIOR_PRECISIONS: Final = (1e2, 1e1, 1e0, 1e-1)
"""Prior precisions tried, for features of unit variance."""


def fit_logistic(
    z: Float[Tensor, "n dim"], held: Bool[Tensor, "n labels"], z_val: Tensor, held_val: Tensor
) -> LogisticHead:
    """Penalised maximum likelihood; the selection split chooses the penalty by its NLL."""
    standardisation = fit_standardisation(z)
    phi, phi_val = standardisation(z)[:], standardisation(z_val)[:]
    fits = {tau: _minimise(phi, held.double(), tau) for tau in PRIOR_PRECISIONS}
    losses = {tau: _nll(theta, phi_val, held_val.double()) / len(phi_val) for tau, theta in fits.items()}
    tau = min(losses, key=lambda each: float(losses[each]))
    return LogisticHead(
        {**standardisation._asdict(), "weight": fits[tau][:, :-1], "bias": fits[tau][:, -1]},
        record={"prior_precision": tau, "val_nll": float(losses[tau])},
    )


FITS: Final[Mapping[str, Callable[..., MultilabelHead]]] = {"logistic": fit_logistic}
"""The fit of each kind in :data:`psc_core.tasks.multilabel.heads.HEADS`."""


def _nll(theta: Tensor, phi: Tensor, held: Tensor) -> Tensor:
    logits = phi @ theta[:, :-1].T + theta[:, -1]
    return functional.binary_cross_entropy_with_logits(logits, held, reduction="sum")


def _minimise(phi: Tensor, held: Tensor, tau: float) -> Tensor:
    theta = phi.new_zeros(held.shape[1], phi.shape[1] + 1).requires_grad_()
    optimizer = torch.optim.LBFGS([theta], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (_nll(theta, phi, held) + 0.5 * tau * theta.square().sum()) / len(phi)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return theta.detach()
