"""The thresholds of a classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from psc_core.tasks.policy import GUARANTEED_RISK, Alpha, BasePolicy, Coverage

FLOAT32_ROUNDING: Final = 1e-4
"""Tolerance for the rounding of float32, by which entropies and probabilities may leave their range."""


def unreachable_entropy(num_classes: int) -> float:
    """Return a threshold (nats) that no image exceeds: twice the largest entropy, log K, which float32 may round up.

    A fit sets it where no threshold keeps the risk.
    """
    return 2.0 * math.log(num_classes)


AmbiguityThreshold = Annotated[
    float, Field(ge=0, description="`abstain_ambiguous` above this predictive entropy, nats.")
]


class ClassificationPolicy(BasePolicy):
    """Decision thresholds.  Only an image that is not out of distribution can be ambiguous."""

    alpha: Alpha
    ambiguity_threshold: AmbiguityThreshold
    coverage: Coverage

    def can_be_ambiguous(self, num_classes: int) -> bool:
        """Return whether the entropy of an image can be above the threshold."""
        return self.ambiguity_threshold <= math.log(num_classes) + FLOAT32_ROUNDING

    def notes(self, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return why no image is called ambiguous, or why others are than the risk of the fit asked for."""
        risk = metrics.get("risk", {"threshold": self.ambiguity_threshold})
        unkept = (
            ""
            if risk["threshold"] is not None
            else (
                f"no entropy threshold keeps the error rate at {risk[GUARANTEED_RISK]:g} with {risk['confidence']:.0%} "
                "confidence"
            )
        )
        if self.can_be_ambiguous(len(classes)):
            if not unkept:
                return []
            # Thresholds in metrics have nine digits.
            if math.isclose(risk.get("nearest_threshold", -1), self.ambiguity_threshold, rel_tol=1e-8):
                origin = f"keeps {risk['nearest']:g}, which was chosen on the same images"
            else:
                origin = (
                    f"of {self.ambiguity_threshold:.4g} nats is that of an earlier calibration, or was set by hand, "
                    "and nothing shows what it keeps"
                )
            return [f"{unkept}; the ambiguity threshold {origin}: check it with psc-eval, or validate on more images"]
        if not unkept or self.ambiguity_threshold != unreachable_entropy(len(classes)):
            return [f"no image is called ambiguous: no entropy is above {self.ambiguity_threshold:.4g} nats"]
        nearest = risk.get("nearest")
        way_out = f"{nearest:g} is the nearest that one keeps: --risk {nearest:g}" if nearest else "raise --risk"
        return [f"no image is called ambiguous: {unkept}; {way_out}, or validate on more images"]
