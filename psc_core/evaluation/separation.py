"""Measure how well each score separates out-of-distribution from in-distribution images; OOD is positive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from jaxtyping import Float
from torch import Tensor

from psc_core.evaluation.base import PRIMARY
from psc_core.metrics import ranking
from psc_core.metrics.ranking import Difference
from psc_core.rates import tolerant_ceil

ENTROPY: Final = f"{PRIMARY}-entropy"
"""The name of the score by which the service calls an image ambiguous."""

EPISTEMIC: Final = f"{PRIMARY}-epistemic"
"""The name of the head's epistemic uncertainty."""

FIELDS: Final = {ENTROPY: "predictive_entropy", EPISTEMIC: "epistemic"}
"""The scores besides the primary one that every answer of the service holds, and the names of their fields."""


@dataclass(frozen=True)
class Separation:
    """The quality of one score as a detector of OOD images."""

    auroc: float
    aupr_in: float  # average precision, in-distribution positive
    aupr_out: float  # average precision, OOD positive
    fpr95: float  # fraction of in-distribution images rejected when 95 % of the OOD images are
    auroc_difference: Difference  # AUROC of the primary score minus this one's, with its standard error
    threshold: float  # exceeded by the fraction α of the in-distribution images


def separation(
    inside: Mapping[str, Float[Tensor, " n"]], outside: Mapping[str, Float[Tensor, " m"]], alpha: float
) -> dict[str, Separation]:
    """Compare two sets of images by every score, and each AUROC with the primary score's.

    Args:
        inside: The scores of in-distribution images by name; higher is more unusual.
        outside: The scores of out-of-distribution images by name.
        alpha: The false-alarm rate of the thresholds.
    """
    return {
        name: Separation(
            auroc=ranking.auroc(inside[name], outside[name]),
            aupr_in=ranking.aupr(-inside[name], -outside[name]),
            aupr_out=ranking.aupr(outside[name], inside[name]),
            fpr95=ranking.fpr95(inside[name], outside[name]),
            auroc_difference=ranking.auroc_difference(inside[PRIMARY], outside[PRIMARY], inside[name], outside[name]),
            threshold=float(inside[name].kthvalue(max(1, tolerant_ceil((1 - alpha) * len(inside[name])))).values),
        )
        for name in inside
    }
