"""The thresholds of a classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from psc_core.tasks.policy import Alpha, BasePolicy, Coverage, guessing, measured

FLOAT32_ROUNDING: Final = 1e-4
"""Tolerance for the rounding of float32, by which entropies and probabilities may leave their range."""

RISKS: Final = (0.05, 0.1, 0.15, 0.2)
"""The error rates of accepted images that a fit tries, the lowest first, where none is asked for."""

ACCEPTS_NOTHING: Final = -1.0
"""The threshold below every entropy: that of a model of which no error rate can be shown."""

AmbiguityThreshold = Annotated[
    float,
    Field(
        ge=ACCEPTS_NOTHING,
        description="`abstain_ambiguous` above this predictive entropy, nats; -1: nothing is accepted.",
    ),
]


class ClassificationPolicy(BasePolicy):
    """Decision thresholds.  Only an image that is not out of distribution can be ambiguous."""

    alpha: Alpha
    ambiguity_threshold: AmbiguityThreshold
    coverage: Coverage
    risk: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Of the images below the ambiguity threshold at most this fraction is wrong, with 95 % confidence, "
        "if they are like the calibration images; null: nothing shows how many.",
    )

    def can_be_ambiguous(self, num_classes: int) -> bool:
        """Return whether the entropy of an image can be above the threshold."""
        return self.ambiguity_threshold <= math.log(num_classes) + FLOAT32_ROUNDING

    def headline(self, metrics: Mapping[str, Any]) -> str:
        if self.ambiguity_threshold < 0:
            found = (
                "NOTHING IS ACCEPTED, every image is abstain_ambiguous: no entropy threshold was shown to keep the "
                f"error rate at {RISKS[-1]:.0%} or less{measured(metrics, 'accuracy')}; check the weights and the "
                "preprocessing, or validate on more images"
            )
        elif self.risk is None:
            found = (
                f"nothing shows how many accepted images are wrong: the ambiguity threshold, "
                f"{self.ambiguity_threshold:.4g} nats, was not chosen by their errors"
            )
        else:
            found = f"of the accepted images at most {100 * self.risk:.3g} % are wrong (95 % confidence)"
            if self.risk > RISKS[0] and metrics.get("risk_asked") is None:
                found += f"; no lower rate could be shown{measured(metrics, 'accuracy')}"
        return guessing(metrics) + found

    def surprises(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the model guesses, or its errors are more than the lowest rate that is tried or asked for."""
        expected = metrics.get("risk_asked") or RISKS[0]
        return super().surprises(metrics) or self.risk is None or self.risk > expected

    def largest_error_rate(self) -> float:
        return 1.0 if self.risk is None else self.risk

    def notes(self, classes: Sequence[str]) -> list[str]:
        if self.can_be_ambiguous(len(classes)):
            return []
        return [f"no image is called ambiguous: no entropy is above {self.ambiguity_threshold:.4g} nats"]
