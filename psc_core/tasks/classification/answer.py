"""The answer of a classifier.

To add an output: declare it in :class:`ClassificationAnswer` as a :data:`.Score` and compute it in
:meth:`psc_core.tasks.classification.heads.base.ClassifierHead.scored`.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, get_args

from pydantic import Field

from psc_core.tasks.answer import (
    BaseAnswer,
    BaseExplanation,
    Document,
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
from psc_core.tasks.classification.policy import ClassificationPolicy

Decision = Literal["accept", "abstain_ambiguous", "abstain_ood"]

DECISIONS: Final[tuple[str, ...]] = get_args(Decision)
"""Names of the decisions; :mod:`.decide` uses their positions as codes."""


class LabelProbability(Document):
    """One of the most probable classes."""

    label: str
    probability: float = Field(ge=0)


class ClassificationExplanation(BaseExplanation):
    """The evidence for the decision on an image."""

    nearest_class: str = Field(
        description="Class at the smallest Mahalanobis distance, to whose training images the features are closest; "
        "`label`, the most probable class, may be another."
    )
    class_distances: list[float] = Field(description="Mahalanobis distance to each class, in class order.")
    unusual_components: list[UnusualComponent] = Field(description="The most deviating ones, largest first.")
    aleatoric: float | None = Field(
        description="The part of `predictive_entropy` that is the image's own, nats; null for base predictions."
    )
    epistemic: float | None = Field(
        description="The rest of `predictive_entropy`, which more training data would remove, nats; null for base "
        "predictions."
    )


class ClassificationAnswer(BaseAnswer):
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
    gates: GatePValues = None
    is_ood: IsOod
    decision: Decision = Field(
        description="`abstain_ood` if `is_ood`, else `abstain_ambiguous` above the ambiguity threshold, else `accept`."
    )
    prediction_set: list[str] = Field(
        description="Set of classes that contains the true one with the nominal coverage."
    )
    explanation: ClassificationExplanation | None = Field(default=None, description="Only with `explain=true`.")

    def cells(self) -> dict[str, str]:
        return {
            "label": self.label,
            "confidence": f"{self.confidence:.3f}",
            "entropy": f"{self.predictive_entropy:.3f}",
            "log density": f"{self.log_density:.2f}",
            "p-value": f"{self.ood_p_value:.4f}",
            "decision": self.decision,
        }


class ClassificationResponse(Response):
    """Predictions in the order of the images."""

    noun: ClassVar[str] = "classes"

    policy: ClassificationPolicy = Field(description="The thresholds that were used.")
    predictions: list[ClassificationAnswer]


RESPONSE: Final = ClassificationResponse
"""The answer to a request."""

SCORES: Final = scores_of(ClassificationAnswer)
"""Names of the scores, in the order of their columns."""
