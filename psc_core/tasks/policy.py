"""The base of every task's policy: the ranges of rates.

Bundles, settings, queries, answers and the client all use the one declaration of each threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

Alpha = Annotated[float, Field(ge=1e-9, lt=1, description="`is_ood` when the p-value is at most this.")]
"""A false-alarm rate; below 10⁻⁹ no calibration set could attain it."""

Coverage = Annotated[float, Field(gt=0, lt=1, description="Nominal coverage of `prediction_set`, or of the interval.")]

GUARANTEED_RISK: Final = "promised"
"""The guaranteed error rate in ``metrics.risk``, by its key in the bundle format."""


class BasePolicy(BaseModel):
    """Base of the policies: every one declares at least ``alpha`` and ``coverage``, among its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    if TYPE_CHECKING:
        alpha: float
        coverage: float

    def notes(self, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return the limits of decisions by this policy that their users should know, a sentence each.

        Args:
            classes: Names of the model's classes.
            metrics: The measurements of a fit, as in the manifest.
        """
        return []
