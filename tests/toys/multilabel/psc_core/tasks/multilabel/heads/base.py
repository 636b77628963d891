"""The base of the heads of a model of several labels."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.head import Head, Scored
from psc_core.tasks.multilabel.answer import SCORES


class MultilabelOutput(NamedTuple):
    """Predictions of a batch."""

    probabilities: Float[Tensor, "batch labels"]
    epistemic: Float[Tensor, " batch"]  # in the head's own epistemic_unit


class MultilabelHead(Head):
    """Base of the heads; subclasses add their ``layout`` and ``epistemic_unit``."""

    score_names = SCORES

    def forward(self, z: Float[Tensor, "batch dim"]) -> MultilabelOutput:
        """Return probabilities and epistemic uncertainty of a batch of feature vectors."""
        raise NotImplementedError

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        probabilities, epistemic = self(features)
        served = probabilities if output is None else output.sigmoid()
        return Scored({"entropy": binary_entropy(served).amax(1), "epistemic": epistemic}, served)


def binary_entropy(p: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return ``−p log p − (1 − p) log(1 − p)`` in nats, 0 log 0 = 0."""
    return cast(Tensor, torch.special.entr(p)) + cast(Tensor, torch.special.entr(1 - p))
