"""The answer of a regression."""

from __future__ import annotations

import math
from typing import ClassVar, Final, Literal, get_args

from pydantic import Field

from psc_core.target import Target
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
from psc_core.tasks.regression.policy import RegressionPolicy

Decision = Literal["accept", "abstain_uncertain", "abstain_ood"]

DECISIONS: Final[tuple[str, ...]] = get_args(Decision)
"""Names of the decisions; :mod:`.decide` uses their positions as codes."""


class NearExample(Document):
    """A training image that the prediction rests on."""

    image: int = Field(ge=0, description="Its position in the training data, from 0.")
    value: float = Field(description="Its number.")
    distance: float = Field(ge=0, description="In length-scales of the layer.")


class LayerNeighbours(Document):
    """The nearest training images of one layer."""

    layer: str
    weight: float = Field(ge=0, le=1, description="What the layer counts for; those of all layers sum to 1.")
    examples: list[NearExample] = Field(description="The nearest first.")


class RegressionExplanation(BaseExplanation):
    """The evidence for the decision on an image."""

    nearest_bin: str = Field(description="Bin of the target at the smallest Mahalanobis distance.")
    bin_distances: list[float] = Field(description="Mahalanobis distance to each bin, in their order.")
    unusual_components: list[UnusualComponent] = Field(description="The most deviating ones, largest first.")
    nearest_examples: list[LayerNeighbours] | None = Field(
        default=None, description="Of each layer that the head `dve` reads; left out for other heads."
    )


class RegressionAnswer(BaseAnswer):
    """The prediction of a regression for one image; `mean` to `upper` are in the target's unit, see `/model`."""

    mean: Score = Field(description="The predicted number.")
    aleatoric: Score = Field(description="Standard deviation of the noise.")
    epistemic: Score = Field(description="Standard deviation that more training data would remove.")
    lower: float = Field(
        description="Lower end of an interval that contains the true number with the nominal coverage."
    )
    upper: float = Field(description="Upper end of the interval.")
    log_density: LogDensity
    ood_score: OodScore
    ood_p_value: PValue
    gates: GatePValues = None
    is_ood: IsOod
    decision: Decision = Field(
        description="`abstain_ood` if `is_ood`, else `abstain_uncertain` where the interval is wider than `max_width`, "
        "else `accept`."
    )
    explanation: RegressionExplanation | None = Field(default=None, description="Only with `explain=true`.")

    def cells(self) -> dict[str, str]:
        return {
            "mean": f"{self.mean:.4g}",
            "deviation": f"{math.hypot(self.aleatoric, self.epistemic):.4g}",
            "interval": f"{self.lower:.4g} … {self.upper:.4g}",
            "log density": f"{self.log_density:.2f}",
            "p-value": f"{self.ood_p_value:.4f}",
            "decision": self.decision,
        }


class RegressionResponse(Response):
    """Predictions of a regression in the order of the images."""

    noun: ClassVar[str] = "a number"

    target: Target = Field(description="What the numbers are.")
    policy: RegressionPolicy = Field(description="The thresholds that were used.")
    predictions: list[RegressionAnswer]


RESPONSE: Final = RegressionResponse
"""The answer to a request."""

SCORES: Final = scores_of(RegressionAnswer)
"""Names of the scores, in the order of their columns."""
