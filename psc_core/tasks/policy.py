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

BETTER_THAN_GUESSING: Final = "better_than_guessing"
"""The metric that says whether predictions depend on the images, by its key in the bundle format."""


class BasePolicy(BaseModel):
    """Base of the policies: every one declares at least ``alpha`` and ``coverage``, among its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    if TYPE_CHECKING:
        alpha: float
        coverage: float

    def headline(self, metrics: Mapping[str, Any]) -> str:
        """Say what is promised of accepted images, or why none is accepted: the first thing that a user has to know.

        Args:
            metrics: The measurements of a fit, as in the manifest.
        """
        raise NotImplementedError

    def surprises(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the headline says what a user has to be warned of."""
        return not metrics.get(BETTER_THAN_GUESSING, True)

    def largest_error_rate(self) -> float | None:
        """Return the fraction of accepted images that is wrong at most, 1 if nothing shows it; or None."""
        return None

    def notes(self, classes: Sequence[str]) -> list[str]:
        """Return the other limits of decisions by this policy that their users should know, a sentence each."""
        return []


def guessing(metrics: Mapping[str, Any]) -> str:
    """Return the opening of a headline about a model whose predictions have nothing to do with the images."""
    if metrics.get(BETTER_THAN_GUESSING, True):
        return ""
    return "THE MODEL IS NO BETTER THAN GUESSING: its weights or its preprocessing are wrong; "


def measured(metrics: Mapping[str, Any], name: str) -> str:
    """Return how good the model is on how many images, in brackets; empty if a manifest does not say so."""
    count, value = metrics.get("validation_images"), metrics.get(name)
    if isinstance(count, int) and isinstance(value, int | float):
        return f" ({count} images, {name} {value:.3g})"
    return ""
