"""The answer of a model of several labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, get_args

from pydantic import Field

from psc_core.tasks.answer import (
    BaseAnswer,
    BaseExplanation,
    GatePValues,
    IsOod,
    LogDensity,
    OodScore,
    PValue,
    Response,
    Score,
    UnusualComponent,
    scores_of,
)
from psc_core.tasks.multilabel.policy import MultilabelPolicy

LabelDecision = Literal["accept", "abstain_undecided", "abstain_ood"]

DECISIONS: Final[tuple[str, ...]] = get_args(LabelDecision)
"""Names of the decisions; :mod:`.decide` uses their positions as codes."""


class MultilabelExplanation(BaseExplanation):
    """Why the image was decided as it was."""

    nearest_label: str = Field(description="Label at the smallest Mahalanobis distance.")
    unusual_components: list[UnusualComponent] = Field(description="The most deviating ones, largest first.")


class MultilabelAnswer(BaseAnswer):
    """The prediction of a model of several labels for one image."""

    labels: list[str] = Field(description="Labels that hold: those of at least even odds.")
    undecided: list[str] = Field(description="Labels that may as well be the other way, at the nominal coverage.")
    probabilities: list[float] = Field(description="Of each label, in their order; they do not sum to 1.")
    entropy: Score = Field(description="Of the least certain label, nats.")
    log_density: LogDensity
    ood_score: OodScore
    ood_p_value: PValue
    epistemic: Score = Field(description="Epistemic uncertainty in `epistemic_unit` of `/model`.")
    gates: GatePValues = None
    is_ood: IsOod
    decision: LabelDecision = Field(
        description="`abstain_ood` if `is_ood`, else `abstain_undecided` with more than `max_undecided` undecided "
        "labels, else `accept`."
    )
    explanation: MultilabelExplanation | None = Field(default=None, description="Only with `explain=true`.")

    def cells(self) -> dict[str, str]:
        return {
            "labels": ", ".join(self.labels),
            "undecided": ", ".join(self.undecided),
            "p-value": f"{self.ood_p_value:.4f}",
            "decision": self.decision,
        }


class MultilabelResponse(Response):
    """Predictions of several labels in the order of the images."""

    noun: ClassVar[str] = "labels"

    policy: MultilabelPolicy = Field(description="The thresholds that were used.")
    predictions: list[MultilabelAnswer]

    @classmethod
    def is_of(cls, document: Mapping[str, Any]) -> bool:
        return super().is_of(document) and "max_undecided" in document["policy"]


RESPONSE: Final = MultilabelResponse
"""The answer to a request."""

SCORES: Final = scores_of(MultilabelAnswer)
"""Names of the scores, in the order of their columns."""
