"""Documents of the HTTP interface other than predictions (:mod:`psc_core.tasks.answer`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, Field

from psc_core.target import Target
from psc_core.tasks.answer import Document
from psc_core.tasks.policy import BasePolicy
from psc_core.tasks.task import task_types

if TYPE_CHECKING:
    _AnyPolicy = BasePolicy
else:
    _AnyPolicy = Union[*(task.policy for task in task_types())]


class ProblemDocument(BaseModel):
    """RFC 9457 problem."""

    type: str = Field(description="URI of the kind of problem.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    index: int | None = Field(default=None, ge=0, description="Position of the image at fault.")
    filename: str | None = Field(default=None, description="File name of the image at fault.")
    retry_after_seconds: int | None = Field(default=None, ge=1)


class HealthDocument(Document):
    """The process answers."""

    status: Literal["ok"]


class ReadyDocument(Document):
    """The readiness for predictions, with reasons where there is none."""

    status: Literal["ready", "not ready"]
    reasons: dict[str, str] = Field(description="Model name, or `service`, to what is missing.")


class Histogram(Document):
    """``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""

    edges: list[float]
    counts: list[int]


class CalibrationDocument(Document):
    """The calibration images behind p-values and thresholds."""

    images: int
    ood_score_threshold: float = Field(description="OOD score above which p ≤ alpha, nats.")
    ood_score: Histogram
    entropy_quantiles: list[float] | None = Field(
        description="Predictive entropies, nats, of which 0, 1, …, 100 % are at most as large; null for a regression."
    )


ClassNames = Annotated[list[str], Field(description="Of a regression the bins of its target.")]
"""Names of a model's classes."""

TaskName = Annotated[str, Field(description="What it predicts: `classification` or `regression`.")]
"""The task of a model."""

PredictedNumber = Annotated[
    Target | None, Field(description="The number that a regression predicts; null for a classifier.")
]
"""The target of a model."""


class ModelDocument(Document):
    """One served model."""

    name: str
    version: str
    layer: str
    predictions: str = Field(description="`psc` or `base`.")
    task: TaskName
    epistemic_unit: str = Field(description="Of `epistemic`; empty for base predictions, which have none.")
    gates: list[str] = Field(description="What the OOD score is made of; empty for a model without gates.")
    device: str
    backend: str
    target: PredictedNumber
    classes: ClassNames
    input: dict[str, Any] = Field(description="Preprocessing.")
    policy: _AnyPolicy
    notes: list[str] = Field(
        description="What to know of decisions by this policy: `No image is called ambiguous`, say."
    )
    calibration: CalibrationDocument
    report: dict[str, Any] = Field(description="What fitting measured: collapse, metrics, provenance.")
    models: list[str] = Field(description="Names of all served models, the default first.")


class RecentDocument(Document):
    """A summary of the latest answers of one process of the service."""

    images: int = Field(description="Monitored images in the window, at most the setting `drift_window`.")
    ood_fraction: float = Field(description="Fraction of these with p ≤ alpha.")
    alpha: float
    drift_active: bool = Field(description="Whether an episode of drift lasts.")
    drift_alarms: int = Field(description="Episodes since this process serves the model.")
    queued_images: int
    queue_limit: int


class ExamplesDocument(Document):
    """Images of a bundle to try."""

    files: list[str]


class ReloadedModel(Document):
    """A model after a reload."""

    name: str
    previous_version: str
    version: str


class ReloadDocument(Document):
    """Answer to a reload."""

    reloaded: list[ReloadedModel]
