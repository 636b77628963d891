"""The answer to ``POST /predict``: OpenAPI's schema of it, and what the client returns."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from psc_core.policy import Policy, ValuePolicy
from psc_core.prediction import ImagePrediction
from psc_core.target import Target
from psc_core.value_prediction import ValuePrediction


class Document(BaseModel):
    """Immutable, with the declared members only."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelRef(Document):
    """Which model answered."""

    name: str
    version: str = Field(description="Digest of the bundle.")
    layer: str = Field(description="Candidate layer(s) whose features are used.")


class PredictResponse(Document):
    """Predictions in the order of the images."""

    model: ModelRef
    policy: Policy = Field(description="The thresholds that were used.")
    predictions: list[ImagePrediction]


class ValueResponse(Document):
    """Predictions of a regression in the order of the images."""

    model: ModelRef
    target: Target = Field(description="What the numbers are.")
    policy: ValuePolicy = Field(description="The thresholds that were used.")
    predictions: list[ValuePrediction]
