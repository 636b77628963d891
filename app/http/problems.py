"""Map errors to HTTP responses by one table, as RFC 9457 ``application/problem+json``.

Under ``/v2`` the body is the Open Inference Protocol's ``{"error": …}``.  Details of errors outside the table never
reach a client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.errors import (
    BodyTooLarge,
    ClientGone,
    DeadlineExceeded,
    Forbidden,
    ImageConflict,
    ImageRefused,
    InferenceFailed,
    LogUnavailable,
    MalformedRequest,
    NotReady,
    Overloaded,
    QueueFull,
    ReloadRunning,
    SlowUpload,
    TooManyImages,
    TooManyPixels,
    TooManyRequests,
    UnattainableAlpha,
    Unauthorized,
    UnavailableMap,
    UnknownImage,
    UnknownModel,
    UnsupportedEncoding,
    UnsupportedMedia,
    UnusableLabel,
)
from app.http.schemas import ProblemDocument
from app.observability.metrics import Metrics
from psc_core.errors import (
    BundleError,
    DeviceError,
    ImageTooLarge,
    PSCError,
    UndecodableImage,
    UnsupportedImage,
    shortened,
)

logger = logging.getLogger("psc.http")

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True)
class Problem:
    """An RFC 9457 problem: its document, and the headers of its response other than the content type."""

    document: ProblemDocument
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The last part of the problem's type, which is the label ``reason`` of ``psc_rejected_total``."""
        return self.document.type.removeprefix(TYPE_PREFIX)


# Maps an error class to (HTTP status, last part of the problem's type, title).
TABLE: Final[Mapping[type[PSCError], tuple[int, str, str]]] = {
    MalformedRequest: (400, "malformed", "Malformed request"),
    Unauthorized: (401, "unauthorized", "API key missing or unknown"),
    Forbidden: (403, "forbidden", "API key not allowed to do this"),
    UnknownModel: (404, "unknown-model", "No model of this name"),
    UnknownImage: (404, "unknown-image", "No such image in the log"),
    SlowUpload: (408, "slow-upload", "The body arrived too slowly"),
    ReloadRunning: (409, "reload-running", "A reload is running"),
    ImageConflict: (409, "image-conflict", "The row is of another image"),
    BodyTooLarge: (413, "body-too-large", "Body too large"),
    TooManyImages: (413, "too-many-images", "Too many images"),
    TooManyPixels: (413, "too-many-pixels", "Too many pixels"),
    ImageTooLarge: (413, "image-too-large", "Image too large"),
    UnsupportedEncoding: (415, "unsupported-encoding", "Unsupported content encoding"),
    UnsupportedMedia: (415, "unsupported-media", "Unsupported content type"),
    UnsupportedImage: (415, "unsupported-image", "Unsupported image format"),
    UndecodableImage: (422, "undecodable-image", "Image cannot be decoded"),
    UnattainableAlpha: (422, "unattainable-alpha", "Alpha below the smallest p-value"),
    UnavailableMap: (422, "no-map", "No map available"),
    UnusableLabel: (422, "unusable-label", "Not a label of the model"),
    BundleError: (422, "bad-bundle", "The bundle cannot be used"),
    QueueFull: (429, "queue-full", "The queue is full"),
    TooManyRequests: (429, "too-many-requests", "Too many requests at once"),
    ClientGone: (499, "client-gone", "The client closed the connection"),
    InferenceFailed: (500, "inference-failed", "The network failed on this request"),
    NotReady: (503, "not-ready", "Not ready"),
    LogUnavailable: (503, "log-unavailable", "The prediction log cannot be used"),
    DeviceError: (503, "device-failed", "The compute device failed"),
    DeadlineExceeded: (504, "deadline", "Deadline exceeded"),
}

INTERNAL: Final = (500, "internal", "Internal error")
# Maps the HTTP status of a request that matches no route to (last part of the problem's type, title).
ROUTING: Final = {
    404: ("not-found", "No such resource"),
    405: ("method-not-allowed", "Method not allowed"),
}

MAX_DETAIL: Final = 1000  # the maximum length of a problem's detail, characters

TYPE_PREFIX: Final = "urn:psc:problem:"


def problem_of(error: BaseException) -> Problem:
    """Return the problem that describes ``error``; an error outside :data:`TABLE` becomes an opaque internal error."""
    cause: BaseException = error.cause if isinstance(error, ImageRefused) else error
    row = next((TABLE[base] for base in type(cause).__mro__ if base in TABLE), None)
    if row is None:
        return make_problem(INTERNAL, "an internal error was logged under this request's id; report it with the id")
    headers: dict[str, str] = {}
    members: dict[str, Any] = {}
    if isinstance(error, ImageRefused):
        members = {"index": error.index, "filename": error.name and shortened(error.name, MAX_DETAIL)}
    if isinstance(error, InferenceFailed):
        members = {"index": error.index}
    if isinstance(cause, Overloaded):
        headers["retry-after"] = str(cause.retry_after)
        members["retry_after_seconds"] = cause.retry_after
    if isinstance(cause, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="psc"'
    if isinstance(cause, UnsupportedEncoding):  # RFC 9110, section 12.5.3: tells it from an unsupported content type.
        headers["accept-encoding"] = "identity"
    if isinstance(cause, (BodyTooLarge, SlowUpload)):
        headers["connection"] = "close"
    return make_problem(row, str(error), headers, **members)


def make_problem(
    row: tuple[int, str, str], detail: str, headers: Mapping[str, str] | None = None, **members: Any
) -> Problem:
    """Return the problem of a row of :data:`TABLE`, with a detail that is not too long."""
    status, slug, title = row
    detail = shortened(detail, MAX_DETAIL)
    document = ProblemDocument(type=TYPE_PREFIX + slug, title=title, status=status, detail=detail, **members)
    return Problem(document, headers or {})


def error_response(error: Exception, scope: Scope, metrics: Metrics) -> Response:
    """Return the response for an error; count it, and log it if the operator should know."""
    problem = problem_of(error)
    if problem.document.status >= 500:
        crashed = problem.document.status == 500
        logger.log(logging.ERROR if crashed else logging.WARNING, "%s", error, exc_info=error if crashed else None)
    return problem_response(problem, scope, metrics)


def problem_response(problem: Problem, scope: Scope, metrics: Metrics) -> Response:
    """Count a problem and return the response for it."""
    metrics.psc_rejected_total.labels(reason=problem.slug).inc()
    document = problem.document
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path == "/v2" or path.startswith("/v2/"):
        body, media_type = orjson.dumps({"error": document.detail}), "application/json"
    else:
        body, media_type = document.model_dump_json(exclude_none=True).encode(), MEDIA_TYPE
    return Response(body, document.status, dict(problem.headers), media_type=media_type)


async def on_http_exception(request: Request, error: Any) -> Response:
    """Answer a request whose path or method has no route; other errors reach :mod:`app.http.middleware`."""
    slug, title = ROUTING.get(error.status_code, (f"http-{error.status_code}", "Request refused"))
    problem = make_problem((error.status_code, slug, title), str(error.detail), error.headers)
    return problem_response(problem, request.scope, request.app.state.service.metrics)
