"""Measure acceptance when some images are out of distribution: accepting one of those counts as an error.

Every score alone is compared with the decision of the service, which rejects an image for its OOD score or for its
predictive entropy.  With one false-alarm rate for both, the decision is a threshold on one score: the larger of an
image's two ranks among in-distribution images.  The predicted class is always the service's.
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
"""The name of the OOD score and the predictive entropy combined into one score."""

ACCEPTED: Final = 0.95
"""Fraction of in-distribution images that a threshold accepts."""


@dataclass(frozen=True)
class Acceptance:
    """The errors of thresholds on one score, counting an accepted OOD image or a wrong class as an error."""

    ood_accepted: float  # fraction of OOD images accepted if 95 % of the in-distribution images are
    aurc: float  # area under the risk-coverage curve, over both sets of images


def acceptance(
    inside: Mapping[str, Float[Tensor, " n"]], outside: Mapping[str, Float[Tensor, " m"]], correct: Bool[Tensor, " n"]
) -> dict[str, Acceptance]:
    """Return the acceptance for thresholds on each score, and for the decision of the service.

    Args:
        inside: The scores of in-distribution images by name; higher is more unusual.
        outside: The scores of out-of-distribution images by name.
        correct: Whether the predicted class of each in-distribution image is right.

    Raises:
        UsageError: If there is no image, or a score is NaN.
    """
    ranked = {name: _with_decision(scores, inside) for name, scores in (("in", inside), ("out", outside))}
    found = {}
    for name, known in ranked["in"].items():
        unknown = ranked["out"][name]
        right = torch.cat([correct, correct.new_zeros(len(unknown))])
        found[name] = Acceptance(ood_accepted(known, unknown), aurc(-torch.cat([known, unknown]), right))
    return found


def ood_accepted(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return the fraction of OOD images under the lowest threshold that accepts :data:`ACCEPTED` of the others."""
    check_values("ood_accepted", in_scores, out_scores)
    ordered = in_scores.sort().values
    # The margin forgives the rounding of the product.
    accepted = torch.arange(1, len(ordered) + 1) >= ACCEPTED * len(ordered) - 1e-9
    threshold = ordered[int(accepted.long().argmax())]
    return float((out_scores <= threshold).double().mean())


def _with_decision(scores: Mapping[str, Tensor], inside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ood, ambiguous = (placements(scores[name], inside[name]) for name in (PRIMARY, ENTROPY))
    return {DECISION: torch.maximum(ood, ambiguous), **scores}
