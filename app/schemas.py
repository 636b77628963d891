"""Documents of the HTTP interface, as the OpenAPI document describes them.

Requests are parsed and answers written without these classes (``app/uploads.py``, ``app/answers.py``); tests
validate real answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Document(BaseModel):
    """Base: immutable, nothing beside the declared members."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelRef(Document):
    """Which model answered."""

    name: str
    version: str = Field(description="Digest of the bundle.")
    layer: str = Field(description="Candidate layer(s) whose features are judged.")


class PolicyDocument(Document):
    """The thresholds that were used."""

    alpha: float = Field(gt=0, lt=1, description="`is_ood` when p ≤ alpha.")
    ambiguity_threshold: float = Field(ge=0, description="Ambiguous above this predictive entropy, nats.")
    coverage: float = Field(gt=0, lt=1, description="Nominal coverage of `prediction_set`.")


class LabelProbability(Document):
    """One of the most probable classes."""

    label: str
    probability: float = Field(ge=0)


class UnusualComponent(Document):
    """A whitened component of the features and how far it is from the nearest class, standard deviations."""

    component: int = Field(ge=0)
    deviation: float


class Explanation(Document):
    """Why the image is judged as it is."""

    nearest_class: str = Field(description="Class at the smallest Mahalanobis distance.")
    class_distances: list[float] = Field(description="Mahalanobis distance to each class, in class order.")
    unusual_components: list[UnusualComponent] = Field(description="The most deviating ones, largest first.")
    calibration_rank: float = Field(description="Share of calibration images at least as unusual.")
    aleatoric: float | None = Field(description="Nats; null for base predictions.")
    epistemic: float | None = Field(description="In `epistemic_unit` of `/model`; null for base predictions.")


class PredictionDocument(Document):
    """What is said of one image."""

    label: str
    class_index: int = Field(ge=0)
    confidence: float = Field(ge=0, description="Probability of `label`.")
    probabilities: list[float] | None = Field(
        default=None, description="Of all classes, in class order; left out when `top_k` is given."
    )
    top: list[LabelProbability] | None = Field(
        default=None, description="The `top_k` most probable classes; only when `top_k` is given."
    )
    predictive_entropy: float = Field(description="Nats.")
    log_density: float = Field(description="log p(z), nats.")
    ood_score: float = Field(
        description="−log p(z), plus the weighted entropy where the bundle says so; higher is stranger."
    )
    ood_p_value: float = Field(ge=0, le=1, description="(1 + #{calibration OOD scores ≥ this}) / (n + 1).")
    epistemic: float = Field(
        description="Epistemic uncertainty in `epistemic_unit` of `/model`; 0 for base predictions."
    )
    is_ood: bool
    decision: Literal["accept", "abstain_ambiguous", "abstain_ood"]
    prediction_set: list[str] = Field(description="Labels of the conformal prediction set.")
    explanation: Explanation | None = Field(default=None, description="Only with `explain=true`.")


class PredictResponse(Document):
    """Answer to a prediction request; predictions are in the order of the images."""

    model: ModelRef
    policy: PolicyDocument
    predictions: list[PredictionDocument]


class JsonImage(Document):
    """An encoded image."""

    b64: str = Field(
        description="Base64 of an image file, padded, without line breaks.",
        pattern=r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        json_schema_extra={"contentEncoding": "base64"},
    )


class JsonImages(Document):
    """JSON form of a prediction request."""

    images: list[JsonImage] = Field(min_length=1)


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
    """Whether predictions are answered now, and why not."""

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


class ModelDocument(Document):
    """One served model."""

    name: str
    version: str
    layer: str
    predictions: str = Field(description="`psc` or `base`.")
    epistemic_unit: str = Field(description="Of `epistemic`; empty for base predictions, which have none.")
    device: str
    classes: list[str]
    input: dict[str, Any] = Field(description="Preprocessing.")
    policy: PolicyDocument
    calibration: CalibrationDocument
    report: dict[str, Any] = Field(description="What fitting measured: collapse, metrics, provenance.")
    models: list[str] = Field(description="Names of all served models, the default first.")


class ReloadedModel(Document):
    """A model after a reload."""

    name: str
    previous_version: str
    version: str


class ReloadDocument(Document):
    """Answer to a reload."""

    reloaded: list[ReloadedModel]
