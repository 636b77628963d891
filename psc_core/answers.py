"""What a service and its clients exchange: queries, policies and answers of every task, without torch.

Each threshold and each field of an answer is declared once: bundles, settings, queries, the packed columns of the
network's step, the JSON answer, its OpenAPI schema, the tensors of the v2 protocol and the client's types all come from
here.

To add an output to an answer, declare it there as a :data:`.Score` and let the task's heads compute it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from psc_core.errors import UsageError, all_faults
from psc_core.text import compose

_Name = Annotated[str, BeforeValidator(lambda value: compose(value) if isinstance(value, str) else value)]


class Target(BaseModel):
    """The name and unit of the number that a regression predicts.

    Examples:
        >>> str(Target(name="angle", unit="degrees"))
        'angle, degrees'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: _Name = Field(min_length=1, max_length=200, description="Name of the number, as a person would say it.")
    unit: _Name = Field(default="", max_length=50, description="Unit of the number; empty if it has none.")

    @classmethod
    def of(cls, name: Any, unit: Any = "") -> Target:
        """Return the target of a name and a unit that a caller gave; raises :class:`.UsageError` for other values."""
        try:
            return cls(name=name, unit=unit)
        except ValidationError as error:
            raise UsageError(f"the target cannot be called so: {all_faults(error.errors(), 'field')}") from error

    def __str__(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


UNNAMED: Final = Target(name="value")  # the target of numbers that nobody named
# A false-alarm rate; below 10⁻⁹ no calibration set could attain it.
Alpha = Annotated[float, Field(ge=1e-9, lt=1, description="`is_ood` when the p-value is at most this.")]
Coverage = Annotated[float, Field(gt=0, lt=1, description="Nominal coverage of `prediction_set`, or of the interval.")]
LARGEST_CLASS: Final = "largest_class"  # a metric's key: the fraction of the calibration images that are of one class
BETTER_THAN_GUESSING: Final = "better_than_guessing"  # a metric's key: whether predictions depend on images


class BasePolicy(BaseModel, ABC):
    """Base of the policies: every one declares at least ``alpha`` and ``coverage``, among its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    if TYPE_CHECKING:
        alpha: float
        coverage: float

    @abstractmethod
    def headline(self, metrics: Mapping[str, Any]) -> str:
        """Say what is promised of clear images, or why none is accepted: the first thing that a user has to know."""

    def surprises(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the headline says what a user has to be warned of."""
        return not metrics.get(BETTER_THAN_GUESSING, True)

    def largest_error_rate(self) -> float | None:
        """Return the fraction of accepted images that is wrong at most, 1 if nothing shows it; or None."""
        return None

    def asked(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that this policy was calibrated with; None for what was left to the calibration."""
        return self.model_dump()

    def notes(self, classes: Sequence[str]) -> list[str]:
        """Return the other limits of decisions by this policy that their users should know, a sentence each."""
        return []


def guessing(metrics: Mapping[str, Any], causes: str) -> str:
    """Return the opening of a headline about a model whose predictions have nothing to do with the images."""
    if metrics.get(BETTER_THAN_GUESSING, True):
        return ""
    return f"THE MODEL IS NO BETTER THAN GUESSING: check {causes}; "


_CAUSES: Final = "the weights and the preprocessing"
_CAUSES_OF_CLASSES: Final = "the weights, the preprocessing and the order of the classes"


def describe_accuracy(metrics: Mapping[str, Any]) -> str:
    """Return how good the model is on how many images, in brackets; empty if a manifest does not say so."""
    count, value = metrics.get("validation_images"), metrics.get("accuracy")
    known = isinstance(count, int) and isinstance(value, int | float)
    return f" ({count} images, accuracy {value:.3g})" if known else ""


def largest_class(metrics: Mapping[str, Any]) -> float:
    """Return the share of the images that show the most frequent class; 0 if a manifest does not say so."""
    share = metrics.get(LARGEST_CLASS)
    return share if isinstance(share, int | float) else 0.0


FLOAT32_ROUNDING: Final = 1e-4  # by how much rounded entropies and probabilities may leave their range
RISKS: Final = (0.05, 0.1, 0.15, 0.2)  # error rates of clear images that a fit tries where none is asked for
ACCEPTS_NOTHING: Final = -1.0  # the threshold below every entropy: that of a model of which no error rate can be shown

AmbiguityThreshold = Annotated[
    float,
    Field(
        ge=ACCEPTS_NOTHING,
        description="`abstain_ambiguous` above this predictive entropy, nats; -1: nothing is accepted.",
    ),
]


class ClassificationPolicy(BasePolicy):
    """Decision thresholds.  Only an image that is not out of distribution can be ambiguous."""

    alpha: Alpha
    ambiguity_threshold: AmbiguityThreshold
    coverage: Coverage
    risk: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Of the images below the ambiguity threshold at most this fraction is wrong, with 95 % confidence, "
        "if they are like the calibration images; null: nothing shows how many.",
    )

    def can_be_ambiguous(self, num_classes: int) -> bool:
        """Return whether the entropy of an image can be above the threshold."""
        return self.ambiguity_threshold <= math.log(num_classes) + FLOAT32_ROUNDING

    def headline(self, metrics: Mapping[str, Any]) -> str:
        if self.ambiguity_threshold < 0:
            found = (
                "NOTHING IS ACCEPTED, every image is abstain_ambiguous: no entropy threshold was shown to keep the "
                f"error rate at {RISKS[-1]:.0%} or less{describe_accuracy(metrics)}; check "
                f"{_CAUSES_OF_CLASSES}, or validate on more images"
            )
        elif self.risk is None:
            found = (
                f"nothing shows how many accepted images are wrong: the ambiguity threshold, "
                f"{self.ambiguity_threshold:.4g} nats, was not chosen by their errors"
            )
        else:
            rate = f"{100 * self.risk:.3g} %"
            found = f"of clear images like the calibration images at most {rate} are wrong (95 % confidence)"
            if self.risk > RISKS[0] and metrics.get("risk_asked") is None:
                tried = ", ".join(f"{100 * risk:g}" for risk in RISKS)
                found += f"; of {tried} %, which were tried, the lowest that could be shown{describe_accuracy(metrics)}"
            if (share := largest_class(metrics)) >= 1 - self.risk:
                found += f"; one answer to all images would keep that, as {share:.1%} are of one class: look at each"
        return guessing(metrics, _CAUSES_OF_CLASSES) + found

    def surprises(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the model guesses, one answer would do, or errors are above the lowest rate tried or asked."""
        expected = metrics.get("risk_asked") or RISKS[0]
        promises_little = self.risk is None or self.risk > expected or largest_class(metrics) >= 1 - self.risk
        return super().surprises(metrics) or promises_little

    def asked(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        risk = metrics.get("risk_asked")
        return super().asked(metrics) | {"risk": risk if isinstance(risk, float) and 0 < risk < 1 else None}

    def largest_error_rate(self) -> float:
        return 1.0 if self.risk is None else self.risk

    def notes(self, classes: Sequence[str]) -> list[str]:
        if self.can_be_ambiguous(len(classes)):
            return []
        return [f"no image is called ambiguous: no entropy is above {self.ambiguity_threshold:.4g} nats"]


MaxWidth = Annotated[
    float, Field(gt=0, description="`abstain_uncertain` where the interval is wider than this, in the target's unit.")
]


WITHOUT_IMAGE: Final = "width_without_image"  # the metric with the width that a calibration took, as none was asked for


class RegressionPolicy(BasePolicy):
    """Decision thresholds of a regression."""

    alpha: Alpha
    max_width: MaxWidth | None  # no interval is too wide for None
    coverage: Coverage

    def asked(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return super().asked(metrics) | ({"max_width": None} if self._has_own_width(metrics) else {})

    def _has_own_width(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the calibration took the width, of its images and for its coverage, as none was asked for."""
        width = metrics.get(WITHOUT_IMAGE, -1.0)
        return self.max_width is not None and math.isclose(self.max_width, width, rel_tol=1e-8)  # It has nine digits.

    def headline(self, metrics: Mapping[str, Any]) -> str:
        if self.max_width is None:
            return f"{guessing(metrics, _CAUSES)}no interval is too wide to be accepted, however little the model knows"
        found = f"images whose interval is wider than {self.max_width:.4g} are abstain_uncertain"
        if self._has_own_width(metrics):
            found += f": an interval that holds {self.coverage:.0%} of the numbers whatever the image is as wide"
        return guessing(metrics, _CAUSES) + found


ACCEPT: Final = "accept"  # the decision of every task on an image that can be relied on, the first of its decisions

_SCORE: Final = "score"
Score = Annotated[float, _SCORE]  # a column of the packed outputs: a number that the network computes for each image
LogDensity = Annotated[
    Score,
    Field(
        description="Log density of the features, nats; for `pooled++`, the default, and `rmd` relative to all images."
    ),
]
OodScore = Annotated[
    Score,
    Field(
        description="What the checks make of the image, or −`log_density` without checks, nats; higher is more unusual."
    ),
]
PValue = Annotated[Score, Field(ge=0, le=1, description="(1 + #{calibration OOD scores ≥ this}) / (n + 1).")]
CheckPValues = Annotated[
    dict[str, float] | None,
    Field(
        description="p-value of each check: `texture` (unusual texture), `content` (unknown content), `confidence` "
        "(no class stands out), `reviewed` (like images reviewed as none of the classes); left out for a model "
        "without checks."
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
        "in-distribution images is as unusual; 0 is usual, 128 one in a hundred, 255 one in 10,000."
    )
    peak: int | None = Field(default=None, ge=0, le=255, description="The brightest level, which the box holds.")
    box: tuple[float, float, float, float] = Field(
        description="Left, top, right and bottom of the most unusual region, as fractions of what the network "
        "sees: the whole image, or its centre where `input` of `/model` has a `resize`."
    )


class StoredImage(Document):
    """A training image that the bundle stores, made smaller."""

    image: int = Field(ge=0, description="Its position in the training data, from 0.")
    label: str = Field(description="Its class; of a regression the bin of its number.")
    value: float | None = Field(default=None, description="Its number; of a regression.")
    distance: float = Field(ge=0, description="In standard deviations within a class.")
    relative_distance: float | None = Field(
        default=None, ge=0, description="`distance` over what is ordinary: the median between nearest stored images."
    )
    png: str = Field(description="Base64 of an 8-bit PNG of at most 64 × 64 pixels.")


class ReviewedKind(Document):
    """Images that people reviewed as none of the classes, which an image is like."""

    name: str = Field(description="What people called them; `none_of_the_classes` if they said nothing more.")
    images: int = Field(ge=1, description="How many of them the model has learnt from.")
    day: str | None = Field(default=None, description="The day on which most of them were logged.")
    nearest: list[StoredImage] | None = Field(
        default=None, description="The nearest of them; left out where the bundle keeps no images."
    )


class BaseExplanation(Document):
    """Base of the evidence for the decision on an image."""

    reviewed: ReviewedKind | None = Field(
        default=None,
        description="The reviewed images that the image is most like, if it is unusual and the p-value of the check "
        "`reviewed` is at most `alpha`.",
    )

    nearest: list[StoredImage] | None = Field(
        default=None,
        description="Training images that the bundle keeps: the three nearest of the likely classes, then the nearest "
        "of all if it is of another class. Left out where it keeps none.",
    )

    map: ExplanationMap | None = Field(default=None, description="Only with `map=true`.")


class ModelRef(Document):
    """The model that answered."""

    name: str
    version: str = Field(description="Digest of the bundle.")
    layer: str = Field(description="Chosen layer(s) whose features are used.")


class BaseAnswer(Document, ABC):
    """Base of the predictions for one image."""

    @abstractmethod
    def cells(self) -> dict[str, str]:
        """Return a row of a table for people: titles of columns to texts."""


class Response(Document):
    """Base of the answers to a prediction request; each task declares ``policy`` and ``predictions``."""

    noun: ClassVar[str]  # the word for the predictions of such a model, in messages

    model: ModelRef

    if TYPE_CHECKING:
        policy: BasePolicy
        predictions: Sequence[BaseAnswer]


ASKED_FOR: Final = ("top", "explanation")  # fields that an answer has only where a request asks for them


def scores_of(prediction: type[BaseAnswer]) -> tuple[str, ...]:
    """Return the names of the fields that are scores, in their order."""
    return tuple(name for name, field in prediction.model_fields.items() if _SCORE in field.metadata)


ClassificationDecision = Literal["accept", "abstain_ambiguous", "abstain_ood"]
CLASSIFICATION_DECISIONS: Final[tuple[str, ...]] = get_args(ClassificationDecision)  # their positions are codes


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
        description="The part of `predictive_entropy` that is the image's own, nats; null without a head's posterior."
    )
    epistemic: float | None = Field(
        description="The rest of `predictive_entropy`, which more training data would remove, nats; null "
        "without a head's posterior."
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
        description="Epistemic uncertainty in `epistemic_unit` of `/model`; 0 for the original network's predictions."
    )
    checks: CheckPValues = None
    is_ood: IsOod
    decision: ClassificationDecision = Field(
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


CLASSIFICATION_SCORES: Final = scores_of(ClassificationAnswer)  # names of the scores, in the order of their columns


RegressionDecision = Literal["accept", "abstain_uncertain", "abstain_ood"]
REGRESSION_DECISIONS: Final[tuple[str, ...]] = get_args(RegressionDecision)  # their positions are codes


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


def to_width(width: float, *numbers: float) -> list[str]:
    """Return numbers to the decimal of a width's second digit, or with four digits where that would be no short text.

    Examples:
        >>> to_width(5.6, 1987.42, 1984.61, 1990.21), to_width(240.0, 84234.0), to_width(1e-9, 0.001)
        (['1987.4', '1984.6', '1990.2'], ['84230'], ['0.001'])
    """
    if not 1e-6 <= width < 1e15:
        return [f"{number:.4g}" for number in numbers]
    places = 1 - math.floor(math.log10(width))
    return [f"{round(number, places) + 0.0:.{max(places, 0)}f}" for number in numbers]


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
    checks: CheckPValues = None
    is_ood: IsOod
    decision: RegressionDecision = Field(
        description="`abstain_ood` if `is_ood`, else `abstain_uncertain` where the interval is wider than `max_width`, "
        "else `accept`."
    )
    explanation: RegressionExplanation | None = Field(default=None, description="Only with `explain=true`.")

    def cells(self) -> dict[str, str]:
        mean, lower, upper = to_width(self.upper - self.lower, self.mean, self.lower, self.upper)
        return {
            "mean": mean,
            "deviation": f"{math.hypot(self.aleatoric, self.epistemic):.4g}",
            "interval": f"{lower} … {upper}",
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


REGRESSION_SCORES: Final = scores_of(RegressionAnswer)  # names of the scores, in the order of their columns


# Of every task, those with more members first: a document is the first whose required members it has.
RESPONSES: Final[tuple[type[Response], ...]] = (RegressionResponse, ClassificationResponse)


def response_type(document: Mapping[str, Any]) -> type[Response]:
    """Return the answer that a document claims to be: one with all members that it requires."""
    for kind in RESPONSES:
        if {name for name, field in kind.model_fields.items() if field.is_required()} <= document.keys():
            return kind
    return RESPONSES[-1]


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
        default=None, description="`is_ood` if p ≤ alpha, in this request; at least 1/(n + 1) for n calibration images."
    )


class ClassificationQuery(PredictQuery):
    """The query parameters of a request to a classifier."""

    top_k: int | None = Field(
        default=None,
        ge=1,
        le=999_999_999,
        description="Return the `top_k` most probable classes as `top` instead of all `probabilities`.",
    )
    ambiguity_threshold: AmbiguityThreshold | None = Field(
        default=None,
        description="For classifiers: `abstain_ambiguous` above this predictive entropy (nats), in this request.",
    )


class RegressionQuery(PredictQuery):
    """The query parameters of a request to a regression."""

    max_width: MaxWidth | None = Field(
        default=None, description="For regressions: `abstain_uncertain` if the interval is wider, in this request."
    )
