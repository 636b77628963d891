"""What the client returns and raises: typed answers and one tree of errors.  No network in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any


class ClientError(Exception):
    """Base of what this module raises."""


class InputError(ClientError):
    """An image that cannot be read here, or a URL or an API key that cannot be used; nothing was sent."""


class ConnectionFailed(ClientError):
    """The service could not be reached, or did not answer in time."""


class BadAnswer(ClientError):
    """An answer this client does not understand; the URL may be another service's."""


class ProblemError(ClientError):
    """The service refused the request.

    Attributes:
        status: HTTP status.
        title: Kind of problem.
        detail: What was wrong this time.
        type: URI of the kind.
        index: Position of the image at fault, if one is.
        filename: Its name, if it has one.
        trace_id: Id under which the service logged it, if it said so.
        retry_after_s: Seconds after which the service asks to try again, if it does.
    """

    def __init__(self, problem: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.title = str(problem.get("title") or _reason(status))
        self.detail = str(problem.get("detail") or "")
        self.type = str(problem.get("type") or "about:blank")
        self.index: int | None = problem.get("index")
        self.filename: str | None = problem.get("filename")
        trace = headers.get("traceresponse", "").split("-")
        self.trace_id = trace[1] if len(trace) == 4 else None
        self.retry_after_s = retry_after_seconds(headers.get("retry-after"))
        super().__init__(f"{status} {self.title}" + (f": {self.detail}" if self.detail else ""))


class Refused(ProblemError):
    """400–499 other than below: the request or one of its images cannot be used."""


class NotAllowed(ProblemError):
    """401 or 403: the API key is missing, unknown, or not for this."""


class Overloaded(ProblemError):
    """429: the queue stayed full through every attempt."""


class Unavailable(ProblemError):
    """503 or 504: not ready through every attempt, or no answer before the service's deadline."""


class ServerFailed(ProblemError):
    """Any other 5xx: a fault of the service."""


@dataclass(frozen=True)
class ModelInfo:
    """Which model answered."""

    name: str
    version: str
    layer: str


@dataclass(frozen=True)
class Policy:
    """The thresholds the service used.

    Attributes:
        alpha: ``is_ood`` when p ≤ alpha.
        ambiguity_threshold: ``abstain_ambiguous`` above this predictive entropy, nats.
        coverage: Nominal coverage of ``prediction_set``.
    """

    alpha: float
    ambiguity_threshold: float
    coverage: float


@dataclass(frozen=True)
class Prediction:
    """What the service says of one image.

    Attributes:
        label: The most probable class.
        class_index: Its position.
        confidence: Its probability.
        predictive_entropy: Nats.
        log_density: log p(z), nats.
        ood_score: −log p(z), plus the weighted entropy where the bundle says so; higher is stranger.
        ood_p_value: Share of calibration images at least as strange, in (0, 1].
        epistemic: Epistemic uncertainty, in the unit of the model's head.
        is_ood: Whether p ≤ alpha.
        decision: ``accept``, ``abstain_ambiguous`` or ``abstain_ood``.
        prediction_set: Classes among which the true one is, with the service's coverage.
        probabilities: One for each class; empty when ``top_k`` was given.
        top: (label, probability) of the ``top_k`` most probable classes; empty when it was not given.
        explanation: As the service gives it, when ``explain`` was asked for.
    """

    label: str
    class_index: int
    confidence: float
    predictive_entropy: float
    log_density: float
    ood_score: float
    ood_p_value: float
    epistemic: float
    is_ood: bool
    decision: str
    prediction_set: tuple[str, ...]
    probabilities: tuple[float, ...] = ()
    top: tuple[tuple[str, float], ...] = ()
    explanation: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Prediction:
        """One element of the answer's ``predictions``; members it does not know are ignored."""
        return cls(
            label=document["label"],
            class_index=document["class_index"],
            confidence=document["confidence"],
            predictive_entropy=document["predictive_entropy"],
            log_density=document["log_density"],
            ood_score=document["ood_score"],
            ood_p_value=document["ood_p_value"],
            epistemic=document["epistemic"],
            is_ood=document["is_ood"],
            decision=document["decision"],
            prediction_set=tuple(document["prediction_set"]),
            probabilities=tuple(document.get("probabilities", ())),
            top=tuple((entry["label"], entry["probability"]) for entry in document.get("top", ())),
            explanation=document.get("explanation"),
        )


@dataclass(frozen=True)
class PredictResult:
    """The answer to one request: predictions in the order of its images."""

    model: ModelInfo
    policy: Policy
    predictions: tuple[Prediction, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PredictResult:
        """The body of an answer."""
        model, policy = document["model"], document["policy"]
        return cls(
            ModelInfo(model["name"], model["version"], model["layer"]),
            Policy(policy["alpha"], policy["ambiguity_threshold"], policy["coverage"]),
            tuple(Prediction.from_json(entry) for entry in document["predictions"]),
        )


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header, a number or an HTTP date; ``None`` when absent or neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _reason(status: int) -> str:
    """The standard phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
