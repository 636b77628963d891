"""The prediction for one image, each field declared once.

The packed columns of the device step, the JSON answer, its OpenAPI schema, the scores among the tensors of the v2
protocol and the client's type all come from :class:`ImagePrediction`.  To add an output: declare it here as a
:data:`Score` and compute it in :meth:`psc_core.model.pipeline.Pipeline.outputs`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

_SCORE: Final = "score"

Score = Annotated[float, _SCORE]
"""A number that the network step computes for each image: one column of its packed outputs."""

LogDensity = Annotated[Score, Field(description="Log density of the features, nats.")]

OodScore = Annotated[
    Score,
    Field(
        description="What the gates make of the image, or −`log_density` without gates, nats; higher is more unusual."
    ),
]

PValue = Annotated[Score, Field(ge=0, le=1, description="(1 + #{calibration OOD scores ≥ this}) / (n + 1).")]

Gates = Annotated[
    dict[str, float] | None,
    Field(
        description="p-value of each gate: `texture` (strange texture), `kind` (unknown kind), `confidence` "
        "(ambiguous); left out for a model without gates.",
    ),
]

IsOod = Annotated[bool, Field(description="p-value ≤ alpha.")]

Decision = Literal["accept", "abstain_ambiguous", "abstain_ood"]

DECISIONS: Final[tuple[str, ...]] = get_args(Decision)
"""Names of the decisions; :mod:`psc_core.model.decision` uses their positions as codes."""


class Document(BaseModel):
    """Base of what an answer is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LabelProbability(Document):
    """One of the most probable classes."""

    label: str
    probability: float = Field(ge=0)


class UnusualComponent(Document):
    """A whitened component of the features and how far it is from the nearest class, standard deviations."""

    component: int = Field(ge=0)
    deviation: float


class Explanation(Document):
    """Why the image was decided as it was."""

    nearest_class: str = Field(description="Class at the smallest Mahalanobis distance.")
    class_distances: list[float] = Field(description="Mahalanobis distance to each class, in class order.")
    unusual_components: list[UnusualComponent] = Field(description="The most deviating ones, largest first.")
    aleatoric: float | None = Field(description="Nats; null for base predictions.")
    epistemic: float | None = Field(description="In `epistemic_unit` of `/model`; null for base predictions.")


class ImagePrediction(Document):
    """The prediction for one image."""

    label: str = Field(description="The most probable class.")
    class_index: int = Field(ge=0, description="Its position among the classes.")
    confidence: float = Field(ge=0, description="Its probability.")
    probabilities: list[float] | None = Field(
        default=None, description="Of all classes, in class order; left out when `top_k` is given."
    )
    top: list[LabelProbability] | None = Field(
        default=None, description="The `top_k` most probable classes; only when `top_k` is given."
    )
    predictive_entropy: Score = Field(description="Nats; high where the image is ambiguous.")
    log_density: LogDensity
    ood_score: OodScore
    ood_p_value: PValue
    epistemic: Score = Field(
        description="Epistemic uncertainty in `epistemic_unit` of `/model`; 0 for base predictions."
    )
    gates: Gates = None
    is_ood: IsOod
    decision: Decision = Field(
        description="`abstain_ood` if `is_ood`, else `abstain_ambiguous` above the ambiguity threshold, else `accept`."
    )
    prediction_set: list[str] = Field(description="Classes that hold the true one with the nominal coverage.")
    explanation: Explanation | None = Field(default=None, description="Only with `explain=true`.")


def scores_of(document: type[Document]) -> tuple[str, ...]:
    """Names of the fields that are scores, in their order."""
    return tuple(name for name, field in document.model_fields.items() if _SCORE in field.metadata)


SCORES: Final = scores_of(ImagePrediction)
"""Names of the scores, in the order of their columns."""
