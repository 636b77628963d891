"""Accepting images of which some are out of distribution: to accept one of those is an error, as a wrong class is.

Compared are every score alone and what the service does: it rejects an image for its OOD score or for its predictive
entropy.  With one false-alarm rate for both that is one score, the larger of an image's two ranks among in-distribution
images.  The predicted class is the service's, whatever the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from psc_core.evaluation.base import PRIMARY
from psc_core.evaluation.separation import ENTROPY
from psc_core.metrics.inputs import check_values
from psc_core.metrics.ranking import placements
from psc_core.metrics.selective import aurc

DECISION: Final = f"{PRIMARY}-decision"
"""The OOD score and the predictive entropy as one score."""

ACCEPTED: Final = 0.95
"""Fraction of in-distribution images that a threshold accepts."""


@dataclass(frozen=True)
class Acceptance:
    """The errors of thresholds on one score, where to accept an OOD image or a wrong class is one."""

    ood_accepted: float  # fraction of OOD images accepted where 95 % of the in-distribution ones are
    aurc: float  # area under risk over coverage, of both kinds of images together


def acceptance(
    inside: Mapping[str, Float[Tensor, " n"]], outside: Mapping[str, Float[Tensor, " m"]], correct: Bool[Tensor, " n"]
) -> dict[str, Acceptance]:
    """Return the acceptance of thresholds on each score, and of the decision of the service.

    Args:
        inside: In-distribution images by score, higher is more unusual.
        outside: Out-of-distribution images by score.
        correct: Whether the class of an in-distribution image is right.

    Raises:
        UsageError: No image, or a score that is not a number.
    """
    ranked = {name: _with_decision(scores, inside) for name, scores in (("in", inside), ("out", outside))}
    found = {}
    for name, known in ranked["in"].items():
        unknown = ranked["out"][name]
        right = torch.cat([correct, correct.new_zeros(len(unknown))])
        found[name] = Acceptance(ood_accepted(known, unknown), aurc(-torch.cat([known, unknown]), right))
    return found


def ood_accepted(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return the fraction of OOD images that the lowest threshold for :data:`ACCEPTED` of the others accepts."""
    check_values("ood_accepted", in_scores, out_scores)
    ordered = in_scores.sort().values
    accepted = torch.arange(1, len(ordered) + 1) >= ACCEPTED * len(ordered) - 1e-9
    threshold = ordered[int(accepted.long().argmax())]
    return float((out_scores <= threshold).double().mean())


def _with_decision(scores: Mapping[str, Tensor], inside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ood, ambiguous = (placements(scores[name], inside[name]) for name in (PRIMARY, ENTROPY))
    return {DECISION: torch.maximum(ood, ambiguous), **scores}
