"""The errors that only the service raises, and how every error is answered: one table, RFC 9457 problem documents.

Under ``/v2`` the body is the Open Inference Protocol's ``{"error": …}``.  Details of errors outside the table never
reach a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from psc_core.errors import (
    BundleError,
    DeviceError,
    ImageError,
    ImageTooLarge,
    PSCError,
    UndecodableImage,
    UnsupportedImage,
    shorten,
)

if TYPE_CHECKING:
    from app.metrics import Metrics


# Maps an error class to (HTTP status, last part of the problem's type, title); the service's own add themselves.
TABLE: Final[dict[type[PSCError], tuple[int, str, str]]] = {
    ImageTooLarge: (413, "image-too-large", "Image too large"),
    UnsupportedImage: (415, "unsupported-image", "Unsupported image format"),
    UndecodableImage: (422, "undecodable-image", "Image cannot be decoded"),
    BundleError: (422, "bad-bundle", "The bundle cannot be used"),
    DeviceError: (503, "device-failed", "The compute device failed"),
}
INTERNAL: Final = (500, "internal", "Internal error")


class ServiceError(PSCError):
    """The base of the errors that only the service raises; ``answer`` is the row in :data:`TABLE`."""

    def __init_subclass__(cls, answer: tuple[int, str, str] | None = None) -> None:
        if answer is not None:
            TABLE[cls] = answer


class MalformedRequest(ServiceError, answer=(400, "malformed", "Malformed request")):
    """The body or a query parameter does not follow the interface."""


class UnattainableAlpha(ServiceError, answer=(422, "unattainable-alpha", "Alpha below the smallest p-value")):
    """The alpha is so small that, with so few calibration images, no image could ever be out of distribution."""


class UnavailableMap(ServiceError, answer=(422, "no-map", "No map available")):
    """A map was asked for from a model that has none."""


class Unauthorized(ServiceError, answer=(401, "unauthorized", "API key missing or unknown")):
    """The request has no API key, or an unknown one."""


class Forbidden(ServiceError, answer=(403, "forbidden", "API key not allowed to do this")):
    """The service has no API key that is allowed to do this."""


class UnknownModel(ServiceError, answer=(404, "unknown-model", "No model of this name")):
    """No model of this name is served."""


class UnknownImage(ServiceError, answer=(404, "unknown-image", "No such image in the log")):
    """The prediction log has no row of this image, or has not stored it."""


class ImageConflict(ServiceError, answer=(409, "image-conflict", "The row is of another image")):
    """The digest differs from that of the image in the row."""


class UnusableLabel(ServiceError, answer=(422, "unusable-label", "Not a label of the model")):
    """The model could not have given this label."""


class LogUnavailable(ServiceError, answer=(503, "log-unavailable", "The prediction log cannot be used")):
    """The prediction log cannot be read or written."""


class SlowUpload(ServiceError, answer=(408, "slow-upload", "The body arrived too slowly")):
    """The body did not arrive within ``upload_seconds``."""


class BodyTooLarge(ServiceError, answer=(413, "body-too-large", "Body too large")):
    """The body has more than ``max_body_bytes``."""


class TooManyImages(ServiceError, answer=(413, "too-many-images", "Too many images")):
    """The request has more than ``max_images_per_request`` images."""


class TooManyPixels(ServiceError, answer=(413, "too-many-pixels", "Too many pixels")):
    """The images of the request have more than ``max_pixels_per_request`` pixels."""


class UnsupportedMedia(ServiceError, answer=(415, "unsupported-media", "Unsupported content type")):
    """The content type is none of the three accepted forms."""


class UnsupportedEncoding(ServiceError, answer=(415, "unsupported-encoding", "Unsupported content encoding")):
    """The body, or a part of it, is compressed or encoded."""


class Overloaded(ServiceError):
    """The service cannot take on more work now."""

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # the whole seconds after which a retry should find room, if that is known


class QueueFull(Overloaded, answer=(429, "queue-full", "The queue is full")):
    """The model's queue has no room."""


class TooManyRequests(Overloaded, answer=(429, "too-many-requests", "Too many requests at once")):
    """There are more than ``max_requests`` requests, or their memory is full (:mod:`app.memory`)."""


class ReloadRunning(ServiceError, answer=(409, "reload-running", "A reload is running")):
    """A reload was asked for while another one is running."""


class NotReady(Overloaded, answer=(503, "not-ready", "Not ready")):
    """The model is loading, warming up or draining, or its device has failed."""


class DeadlineExceeded(ServiceError, answer=(504, "deadline", "Deadline exceeded")):
    """There was no result within ``deadline_seconds``."""


class InferenceFailed(ServiceError, answer=(500, "inference-failed", "The network failed on this request")):
    """The network failed on an image that was decoded without error, or gave numbers that are not finite."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"image {index}: {reason}")
        self.index = index


class ClientGone(ServiceError, answer=(499, "client-gone", "The client closed the connection")):
    """The client closed its connection before the answer."""


class EngineLost(Overloaded, answer=(503, "engine-lost", "The engine is being replaced")):
    """The process that predicts has ended, and another one is not ready yet."""


class RefusedByFront(ServiceError):
    """A front has refused the body of the request; its members are those of :func:`problem_of`."""

    def __init__(self, problem: dict[str, Any], headers: dict[str, str]) -> None:
        super().__init__(problem["detail"])
        self.problem = problem
        self.headers = headers


class ImageRefused(ServiceError):
    """One image of the request cannot be used."""

    def __init__(self, index: int, name: str | None, cause: ImageError) -> None:
        where = f"image {index}" if name is None else f"image {index} ({name!r})"
        super().__init__(f"{where}: {cause}")
        self.index = index
        self.name = name  # the file name that the client gave, if any
        self.cause = cause  # the reason, which decides the HTTP status


logger = logging.getLogger("psc.http")

MEDIA_TYPE: Final = "application/problem+json"


class ProblemDocument(BaseModel):
    """An RFC 9457 problem."""

    type: str = Field(description="The URI of the type of problem.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    index: int | None = Field(default=None, ge=0, description="The position of the image at fault, from 0.")
    filename: str | None = Field(default=None, description="The file name of the image at fault.")
    retry_after_seconds: int | None = Field(default=None, ge=1)


# Maps the HTTP status of a request that matches no route to (last part of the problem's type, title).
ROUTING: Final = {404: ("not-found", "No such resource"), 405: ("method-not-allowed", "Method not allowed")}
MAX_DETAIL: Final = 1000
TYPE_PREFIX: Final = "urn:psc:problem:"


def problem_of(error: BaseException) -> tuple[ProblemDocument, dict[str, str]]:
    """Return the problem that describes an error, opaque if it is not in :data:`TABLE`, and the answer's headers."""
    if isinstance(error, RefusedByFront):
        return ProblemDocument(**error.problem), error.headers
    cause: BaseException = error.cause if isinstance(error, ImageRefused) else error
    row = next((TABLE[base] for base in type(cause).__mro__ if base in TABLE), None)
    headers: dict[str, str] = {}
    members: dict[str, Any] = {}
    if row is None:
        row, error = INTERNAL, PSCError("an internal error was logged under this request's id; report it with the id")
    if isinstance(error, ImageRefused):
        members = {"index": error.index, "filename": error.name and shorten(error.name, MAX_DETAIL)}
    if isinstance(error, InferenceFailed):
        members = {"index": error.index}
    if isinstance(cause, Overloaded) and cause.retry_after is not None:
        headers["retry-after"] = str(cause.retry_after)
        members["retry_after_seconds"] = cause.retry_after
    if isinstance(cause, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="psc"'
    if isinstance(cause, UnsupportedEncoding):  # RFC 9110, section 12.5.3: tells it from an unsupported content type.
        headers["accept-encoding"] = "identity"
    if isinstance(cause, (BodyTooLarge, SlowUpload)):
        headers["connection"] = "close"
    return make_problem(row, str(error), **members), headers


def make_problem(row: tuple[int, str, str], detail: str, **members: Any) -> ProblemDocument:
    """Return the problem of a row of :data:`TABLE`, with a detail that is not too long."""
    status, slug, title = row
    detail = shorten(detail, MAX_DETAIL)
    return ProblemDocument(type=TYPE_PREFIX + slug, title=title, status=status, detail=detail, **members)


def error_response(error: Exception, scope: Scope, metrics: Metrics) -> Response:
    """Return the response for an error; count it, and log it if the operator should know."""
    problem, headers = problem_of(error)
    if problem.status >= 500:
        crashed = problem.status == 500
        logger.log(logging.ERROR if crashed else logging.WARNING, "%s", error, exc_info=error if crashed else None)
    return problem_response(problem, headers, scope, metrics)


def problem_response(
    problem: ProblemDocument, headers: Mapping[str, str] | None, scope: Scope, metrics: Metrics | None
) -> Response:
    """Return the response for a problem, and count it where there are metrics."""
    if metrics is not None:
        metrics.psc_rejected_total.labels(reason=problem.type.removeprefix(TYPE_PREFIX)).inc()
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path == "/v2" or path.startswith("/v2/"):
        body, media_type = orjson.dumps({"error": problem.detail}), "application/json"
    else:
        body, media_type = problem.model_dump_json(exclude_none=True).encode(), MEDIA_TYPE
    return Response(body, problem.status, headers, media_type=media_type)


async def on_http_exception(request: Request, error: Any) -> Response:
    """Answer a request whose path or method has no route; other errors reach :mod:`app.http.middleware`."""
    slug, title = ROUTING.get(error.status_code, (f"http-{error.status_code}", "Request refused"))
    problem = make_problem((error.status_code, slug, title), str(error.detail))
    return problem_response(problem, error.headers, request.scope, request.app.state.service.metrics)


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
_TITLES: Final = sorted({(status, title) for status, _, title in [*TABLE.values(), INTERNAL]})
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds to wait before a retry.", "schema": {"type": "integer", "minimum": 1}}
}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses=`` of a route that can answer with problems of these statuses."""
    schema = {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}
    return {
        status: {
            "description": ". ".join(title for of, title in _TITLES if of == status) + ".",
            "content": {MEDIA_TYPE: {"schema": schema}},
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in statuses
    }


def get_and_head(router: APIRouter | FastAPI, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Register an endpoint for GET and HEAD, with which some load balancers and monitors ask."""

    def register(endpoint: Endpoint) -> Endpoint:
        # The first route answers, also a 405 with its methods; the second one is for the document, which has only GET.
        router.api_route(path, methods=["GET", "HEAD"], **{**options, "include_in_schema": False})(endpoint)
        if options.get("include_in_schema", True):
            router.get(path, **options)(endpoint)
        return endpoint

    return register
