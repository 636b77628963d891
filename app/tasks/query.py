"""The query parameters of a prediction that every task has; a task adds its thresholds and options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from psc_core.tasks.policy import Alpha


class PredictQuery(BaseModel):
    """The query parameters of a prediction; thresholds are named as in the task's policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    explain: bool = Field(default=False, description="Add an `explanation` to each prediction.")
    map: bool = Field(
        default=False,
        description="Add a `map` to each `explanation`, which shows where the image is unusual; needs `explain=true`.",
    )
    monitor: bool = Field(
        default=True,
        description="`false` for images that are not part of the usual stream, such as tests: they are left out of "
        "drift and of the metrics of scores, and counted in `psc_unmonitored_images_total`.",
    )
    alpha: Alpha | None = Field(
        default=None,
        description="`is_ood` if p ≤ alpha, in this request; at least 1/(n + 1) for n calibration images.",
    )
