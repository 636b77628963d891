"""The thresholds that turn outputs into decisions, with their ranges.

Bundles, settings, queries, answers and the client all use this one declaration.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Alpha = Annotated[float, Field(ge=1e-9, lt=1, description="`is_ood` when the p-value is at most this.")]
"""A false-alarm rate; below 10⁻⁹ no calibration set could attain it."""

AmbiguityThreshold = Annotated[float, Field(ge=0, description="Ambiguous above this predictive entropy, nats.")]

Coverage = Annotated[float, Field(gt=0, lt=1, description="Nominal coverage of `prediction_set`, or of the interval.")]

MaxWidth = Annotated[
    float, Field(gt=0, description="Uncertain where the interval is wider than this, in the target's unit.")
]


class Policy(BaseModel):
    """Decision thresholds.  Only an image that is not out of distribution can be ambiguous."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    alpha: Alpha
    ambiguity_threshold: AmbiguityThreshold
    coverage: Coverage


class ValuePolicy(BaseModel):
    """Decision thresholds of a regression."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    alpha: Alpha
    max_width: MaxWidth | None  # no interval is too wide for None
    coverage: Coverage
