"""The thresholds that turn outputs into decisions, with their ranges.

Bundles, settings, queries, answers and the client all use this one declaration.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Alpha = Annotated[float, Field(ge=1e-9, lt=1, description="`is_ood` when the p-value is at most this.")]
"""A false-alarm rate; below 10⁻⁹ no calibration set could attain it."""

AmbiguityThreshold = Annotated[float, Field(ge=0, description="Ambiguous above this predictive entropy, nats.")]

Coverage = Annotated[float, Field(gt=0, lt=1, description="Nominal coverage of `prediction_set`.")]


class Policy(BaseModel):
    """Decision thresholds.

    Attributes:
        alpha: An image is out of distribution when its p-value is at most this.
        ambiguity_threshold: Otherwise it is ambiguous when its predictive entropy (nats) is above this.
        coverage: Nominal coverage of the prediction sets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    alpha: Alpha
    ambiguity_threshold: AmbiguityThreshold
    coverage: Coverage
