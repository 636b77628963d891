"""The thresholds of a classifier."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from psc_core.tasks.policy import Alpha, BasePolicy, Coverage

AmbiguityThreshold = Annotated[float, Field(ge=0, description="Ambiguous above this predictive entropy, nats.")]


class Policy(BasePolicy):
    """Decision thresholds.  Only an image that is not out of distribution can be ambiguous."""

    alpha: Alpha
    ambiguity_threshold: AmbiguityThreshold
    coverage: Coverage
