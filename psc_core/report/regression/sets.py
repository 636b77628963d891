"""The data that a regression's report keeps of a set of images; it shows none of the images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.regression import ScoredNumbers, numbers_of, quality_of
from psc_core.model import PSCRegressor
from psc_core.report.content import Picture, Role, ScoredSet, parts_of


@dataclass(frozen=True)
class RegressionSet(ScoredSet):
    """The numbers that a regression predicts for n images, in the target's unit."""

    mean: Float[Tensor, " n"]
    deviation: Float[Tensor, " n"]  # predicted standard deviation
    values: Float[Tensor, " m"]  # the true numbers; empty for images without them


SET: Final = RegressionSet
"""The type of the sets in a report."""


def scored_set(name: str, role: Role, data: ImageDataset, scored: ScoredNumbers) -> RegressionSet:
    """Return the data that reports keep of the scores of ``data``; true numbers of OOD images are dropped."""
    values = data.values if role.is_known else None
    return RegressionSet(
        name,
        role,
        scored.ood_score,
        scored.mean,
        scored.deviation,
        torch.empty(0, dtype=torch.float64) if values is None else values,
        quality={} if values is None else quality_of(scored, data),
        groups=parts_of(data),
    )


def made_up_set(name: str, model: PSCRegressor, packed: Float[Tensor, "n columns"]) -> RegressionSet:
    """Return the data that reports keep of the packed outputs for made-up images."""
    scored, none = numbers_of(model, packed), torch.empty(0, dtype=torch.float64)
    return RegressionSet(name, Role.MADE_UP, scored.ood_score, scored.mean, scored.deviation, none)


def pictures_of(data: ImageDataset, scored: ScoredNumbers) -> tuple[Picture, ...]:
    """Return no pictures, because a regression's report shows none."""
    return ()
