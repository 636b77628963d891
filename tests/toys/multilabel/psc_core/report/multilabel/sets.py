"""The part of a set of images that the report of a model of several labels keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxtyping import Float
from torch import Tensor

from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.multilabel import ScoredLabels, labels_of, quality_of
from psc_core.model import FittedModel
from psc_core.report.content import Picture, Role, ScoredSet, parts_of


@dataclass(frozen=True)
class MultilabelSet(ScoredSet):
    """Scores of a model of several labels for n images."""

    entropy: Float[Tensor, " n"]  # of the least certain label, nats


SET: Final = MultilabelSet
"""The type of the sets that a report keeps."""


def scored_set(name: str, role: Role, data: ImageDataset, scored: ScoredLabels) -> MultilabelSet:
    """Return the part of the scores of ``data`` that reports show."""
    quality = quality_of(scored, data) if role.is_known else {}
    return MultilabelSet(name, role, scored.ood_score, scored.entropy, quality=quality, groups=parts_of(data))


def made_up_set(name: str, model: FittedModel, packed: Float[Tensor, "n columns"]) -> MultilabelSet:
    """Return the part of the packed outputs for made-up images that reports show."""
    scored = labels_of(model, packed)
    return MultilabelSet(name, Role.MADE_UP, scored.ood_score, scored.entropy)


def pictures_of(data: ImageDataset, scored: ScoredLabels) -> tuple[Picture, ...]:
    """Return no pictures."""
    return ()
