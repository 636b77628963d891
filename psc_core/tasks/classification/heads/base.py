"""The base of a classifier's heads."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.classification.answer import SCORES
from psc_core.tasks.head import Head, Scored


class HeadOutput(NamedTuple):
    """Predictions of a batch."""

    probabilities: Float[Tensor, "batch classes"]  # of each class; they sum to 1
    epistemic: Float[Tensor, " batch"]  # what more training data would remove, in the head's epistemic_unit
    energy: Float[Tensor, " batch"]  # −log Σ_k exp f_k of the logits f, nats: high where no class has evidence


class UncertaintyDecomposition(NamedTuple):
    """The two parts of the predictive entropy, nats: neither is negative, and their sum is the served entropy."""

    aleatoric: Float[Tensor, " batch"]  # ambiguity of the image itself
    epistemic: Float[Tensor, " batch"]  # the rest, which more training data would remove


class ClassifierHead(Head):
    """Base of the heads of a classifier; subclasses add their ``layout`` and ``epistemic_unit``."""

    score_names = SCORES

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Return probabilities and epistemic uncertainty of a batch of feature vectors."""
        raise NotImplementedError

    def decompose(self, z: Float[Tensor, "batch dim"]) -> UncertaintyDecomposition:
        """Return the two parts of the predictive entropy; all of it is aleatoric for a head without a posterior."""
        total = entropy(self(z).probabilities)
        return UncertaintyDecomposition(total, torch.zeros_like(total))

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        return scored(*self(features))

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        return dict(self.decompose(features)._asdict())


def scored(
    probabilities: Float[Tensor, "batch classes"],
    epistemic: Float[Tensor, " batch"],
    energy: Float[Tensor, " batch"],
    entropies: Float[Tensor, " batch"] | None = None,
) -> Scored:
    """Return the scores of a classifier except the density's, and the energy, which the gate ``confidence`` reads.

    The entropies of the probabilities are computed unless they are given.
    """
    entropies = entropy(probabilities) if entropies is None else entropies
    return Scored({"predictive_entropy": entropies, "epistemic": epistemic, "energy": energy}, probabilities)


def entropy(probabilities: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch"]:
    """Return ``−Σ_k p_k log p_k`` in nats, 0 log 0 = 0."""
    return cast(Tensor, torch.special.entr(probabilities)).sum(dim=-1)
