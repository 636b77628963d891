"""The documents of the HTTP interface other than predictions (:mod:`psc_core.answers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, Field

from psc_core.answers import BasePolicy, Document, Target
from psc_core.tasks import TASKS

if TYPE_CHECKING:
    _AnyPolicy = BasePolicy
else:
    _AnyPolicy = Union[*(task.policy_type for task in TASKS.values())]


class ProblemDocument(BaseModel):
    """An RFC 9457 problem."""

    type: str = Field(description="The URI of the type of problem.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    index: int | None = Field(default=None, ge=0, description="The position of the image at fault, from 0.")
    filename: str | None = Field(default=None, description="The file name of the image at fault.")
    retry_after_seconds: int | None = Field(default=None, ge=1)


class HealthDocument(Document):
    """The answer of a process that is alive."""

    status: Literal["ok"]


class ReadyDocument(Document):
    """Whether the service is ready to predict, and why not."""

    status: Literal["ready", "not ready"]
    reasons: dict[str, str] = Field(
        description="What is missing, by model name or `service`; empty if the service is ready."
    )


class Histogram(Document):
    """A histogram: ``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""

    edges: list[float]
    counts: list[int]


class CalibrationDocument(Document):
    """The scores of the calibration images, from which p-values and thresholds come."""

    images: int
    ood_score_threshold: float = Field(description="The OOD score above which p ≤ alpha, nats.")
    ood_score: Histogram
    entropy_quantiles: list[float] | None = Field(
        description="The quantiles 0, 1, …, 100 % of the predictive entropy, nats; null for a regression."
    )


ClassNames = Annotated[
    list[str], Field(description="The names of the classes; for a regression, the bins of its target.")
]
TaskName = Annotated[str, Field(description="The task: `classification` or `regression`.")]
PredictedNumber = Annotated[
    Target | None, Field(description="The number that a regression predicts; null for a classifier.")
]


class ModelDocument(Document):
    """One served model."""

    name: str
    version: str
    layer: str
    predictions: str = Field(description="`psc` or `base`.")
    task: TaskName
    epistemic_unit: str = Field(description="The unit of `epistemic`; empty for base predictions, which lack it.")
    gates: list[str] = Field(description="The gates that make up the OOD score; empty for a model without gates.")
    device: str
    backend: str
    target: PredictedNumber
    classes: ClassNames
    input: dict[str, Any] = Field(description="The preprocessing of images.")
    policy: _AnyPolicy
    notes: list[str] = Field(
        description="What is promised of accepted images, or why none is accepted; then remarks on decisions by this "
        "policy, such as `no image is called ambiguous`."
    )
    calibration: CalibrationDocument
    report: dict[str, Any] = Field(description="The measurements of the fit: collapse, metrics, provenance.")
    models: list[str] = Field(description="The names of all served models, the default first.")
    feedback: bool = Field(description="Whether the service keeps a prediction log, so that `/feedback` is served.")


class RecentDocument(Document):
    """A summary of the latest answers of one process of the service."""

    images: int = Field(description="The number of monitored images in the window, at most `drift_window`.")
    ood_fraction: float = Field(description="The fraction of these images with p ≤ alpha.")
    alpha: float
    drift_active: bool = Field(description="Whether an episode of drift is going on.")
    drift_alarms: int = Field(description="The number of episodes since this process began to serve the model.")
    queued_images: int
    queue_limit: int


class ExamplesDocument(Document):
    """The images to try in a bundle."""

    files: list[str]


class ReloadedModel(Document):
    """A model after a reload."""

    name: str
    previous_version: str
    version: str


class ReloadDocument(Document):
    """The answer to a reload."""

    reloaded: list[ReloadedModel]
