"""The thresholds of a regression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from psc_core.tasks.policy import Alpha, BasePolicy, Coverage, guessing

MaxWidth = Annotated[
    float, Field(gt=0, description="`abstain_uncertain` where the interval is wider than this, in the target's unit.")
]


class RegressionPolicy(BasePolicy):
    """Decision thresholds of a regression."""

    alpha: Alpha
    max_width: MaxWidth | None  # no interval is too wide for None
    coverage: Coverage

    def headline(self, metrics: Mapping[str, Any]) -> str:
        if self.max_width is None:
            return f"{guessing(metrics)}no interval is too wide to be accepted, however little the model knows"
        found = f"images whose interval is wider than {self.max_width:.4g} are abstain_uncertain"
        if math.isclose(self.max_width, metrics.get("width_without_image", -1.0), rel_tol=1e-8):  # It has nine digits.
            found += f": an interval that holds {self.coverage:.0%} of the numbers whatever the image is as wide"
        return guessing(metrics) + found
