"""The losses of a classifier on each labelled example, and the metrics computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from psc_core.data.dataset import Batch
from psc_core.metrics.classification import adaptive_ece, ece, label_brier, label_nll
from psc_core.metrics.selective import augrc, aurc, coverage_at_risk


class Losses(NamedTuple):
    """The losses on n labelled examples."""

    nll: Float[Tensor, " n"]  # nats
    brier: Float[Tensor, " n"]  # in [0, 2]
    confidence: Float[Tensor, " n"]  # the highest probability
    correct: Bool[Tensor, " n"]  # whether the most probable class is the label


def losses_of(probabilities: Float[Tensor, "batch classes"], batch: Batch) -> Losses:
    """Return the losses on the labelled examples of a batch."""
    p, labels = batch.per_example(probabilities), batch.labels
    confidence, predicted = p.double().max(1)
    return Losses(label_nll(p, labels), label_brier(p, labels), confidence, predicted == labels)


QUALITIES: Final[Mapping[str, tuple[str, Callable[[Losses], float]]]] = {
    "accuracy": ("Accuracy", lambda losses: float(losses.correct.double().mean())),
    "nll": ("NLL", lambda losses: float(losses.nll.mean())),
    "brier": ("Brier", lambda losses: float(losses.brier.mean())),
    "ece": ("ECE", lambda losses: ece(losses.confidence, losses.correct)),
    "adaptive_ece": ("aECE", lambda losses: adaptive_ece(losses.confidence, losses.correct)),
    "aurc": ("AURC", lambda losses: aurc(losses.confidence, losses.correct)),
    "augrc": ("AUGRC", lambda losses: augrc(losses.confidence, losses.correct)),
    "coverage_at_risk_1_percent": ("cov@1%", lambda losses: coverage_at_risk(losses.confidence, losses.correct, 0.01)),
    "coverage_at_risk_5_percent": ("cov@5%", lambda losses: coverage_at_risk(losses.confidence, losses.correct, 0.05)),
}
"""The metrics of a classifier: the title of the column, and the function of the losses."""
