"""The thresholds of a regression."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from psc_core.tasks.policy import Alpha, BasePolicy, Coverage

MaxWidth = Annotated[
    float, Field(gt=0, description="`abstain_uncertain` where the interval is wider than this, in the target's unit.")
]


class RegressionPolicy(BasePolicy):
    """Decision thresholds of a regression."""

    alpha: Alpha
    max_width: MaxWidth | None  # no interval is too wide for None
    coverage: Coverage
