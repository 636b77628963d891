"""The parts of every task's answers.

A task's ``answer`` module declares each field once: the packed columns of the device step, the JSON answer, its OpenAPI
schema, the scores among the tensors of the v2 protocol and the client's type all come from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from psc_core.tasks import TASKS, module_of
from psc_core.tasks.policy import BasePolicy

ACCEPT: Final = "accept"
"""The decision of every task on an image that can be relied on, the first of its decisions."""

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

GatePValues = Annotated[
    dict[str, float] | None,
    Field(
        description="p-value of each gate: `texture` (anomalous texture), `kind` (unknown kind), `confidence` "
        "(no class has much evidence); left out for a model without gates.",
    ),
]

IsOod = Annotated[bool, Field(description="p-value ≤ alpha.")]


class Document(BaseModel):
    """Base of the parts of an answer: immutable, with the declared members only."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class UnusualComponent(Document):
    """A whitened component of the features and how far it is from the nearest class, standard deviations."""

    component: int = Field(ge=0)
    deviation: float


class ExplanationMap(Document):
    """A map of how unusual the image is at each position of a layer, and its most unusual region."""

    layer: str = Field(description="The layer whose positions they are.")
    png: str = Field(
        description="Base64 of an 8-bit grey PNG, a pixel for each position. Level g: one in 10^(4g/255) positions of "
        "in-distribution images is as anomalous; 0 is usual, 128 one in a hundred, 255 one in 10,000."
    )
    box: tuple[float, float, float, float] = Field(
        description="Left, top, right and bottom of the most anomalous region, as fractions of what the network "
        "sees: the whole image, or its centre where `input` of `/model` has a `resize`."
    )


class KeptImage(Document):
    """A training image that the bundle keeps as a thumbnail."""

    image: int = Field(ge=0, description="Its position in the training data, from 0.")
    label: str = Field(description="Its class; of a regression the bin of its number.")
    value: float | None = Field(default=None, description="Its number; of a regression.")
    distance: float = Field(ge=0, description="In standard deviations within a class.")
    png: str = Field(description="Base64 of an 8-bit PNG of at most 64 × 64 pixels.")


class BaseExplanation(Document):
    """Base of the evidence for the decision on an image."""

    nearest: list[KeptImage] | None = Field(
        default=None,
        description="The nearest of the training images that the bundle keeps; left out where it has none.",
    )

    map: ExplanationMap | None = Field(default=None, description="Only with `map=true`.")


class ModelRef(Document):
    """The model that answered."""

    name: str
    version: str = Field(description="Digest of the bundle.")
    layer: str = Field(description="Candidate layer(s) whose features are used.")


class BaseAnswer(Document):
    """Base of the predictions for one image."""

    def cells(self) -> dict[str, str]:
        """Return a row of a table for people: titles of columns to texts."""
        raise NotImplementedError


class Response(Document):
    """Base of the answers to a prediction request; each task declares ``policy`` and ``predictions``."""

    noun: ClassVar[str]  # the word for the predictions of such a model, in messages

    model: ModelRef

    if TYPE_CHECKING:
        policy: BasePolicy
        predictions: Sequence[BaseAnswer]

    @classmethod
    def is_of(cls, document: Mapping[str, Any]) -> bool:
        """Return whether a document claims to be such an answer: it has all members that the class requires."""
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return required <= document.keys()


def response_type(document: Mapping[str, Any]) -> type[Response]:
    """Return the answer that a document claims to be."""
    responses: list[type[Response]] = [module_of(name, "psc_core.tasks.{}.answer").RESPONSE for name in TASKS]
    return next((each for each in responses if each.is_of(document)), responses[-1])


ASKED_FOR: Final = ("top", "explanation")
"""Fields that an answer has only where a request asks for them."""


def scores_of(prediction: type[BaseAnswer]) -> tuple[str, ...]:
    """Return the names of the fields that are scores, in their order."""
    return tuple(name for name, field in prediction.model_fields.items() if _SCORE in field.metadata)
