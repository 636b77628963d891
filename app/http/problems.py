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
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.errors import (
    INTERNAL,
    TABLE,
    BodyTooLarge,
    ImageRefused,
    InferenceFailed,
    Overloaded,
    SlowUpload,
    Unauthorized,
    UnsupportedEncoding,
)
from app.observability.metrics import Metrics
from psc_core.errors import shortened

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


@dataclass(frozen=True)
class Problem:
    """An RFC 9457 problem: its document, and the headers of its response other than the content type."""

    document: ProblemDocument
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The last part of the problem's type, which is the label ``reason`` of ``psc_rejected_total``."""
        return self.document.type.removeprefix(TYPE_PREFIX)


# Maps the HTTP status of a request that matches no route to (last part of the problem's type, title).
ROUTING: Final = {404: ("not-found", "No such resource"), 405: ("method-not-allowed", "Method not allowed")}
MAX_DETAIL: Final = 1000
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
