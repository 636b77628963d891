"""Errors as RFC 9457 ``application/problem+json`` responses, and what the OpenAPI document says of them.

Under ``/v2`` the body is that of the Open Inference Protocol, ``{"error": …}``.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.errors import ROUTING, TYPE_PREFIX, Problem, problem_of
from app.metrics import Metrics
from psc_core.errors import PSCError

logger = logging.getLogger("psc.http")

MEDIA_TYPE: Final = "application/problem+json"


def error_response(error: Exception, scope: Scope, metrics: Metrics) -> Response:
    """Log what the operator must know of an error, count it, and give the response for it.

    Args:
        error: Any error.
        scope: Of the request that it ended.
        metrics: Where it is counted.
    """
    problem = problem_of(error)
    if problem.status >= 500:
        crashed = problem.status == 500
        logger.log(logging.ERROR if crashed else logging.WARNING, "%s", error, exc_info=error if crashed else None)
    return _response(problem, scope, metrics)


def _response(problem: Problem, scope: Scope, metrics: Metrics) -> Response:
    metrics.rejected(problem.reason)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path == "/v2" or path.startswith("/v2/"):
        body, media_type = orjson.dumps({"error": problem.detail}), "application/json"
    else:
        body, media_type = orjson.dumps(problem.to_json()), MEDIA_TYPE
    return Response(body, problem.status, dict(problem.headers), media_type=media_type)


def install(app: FastAPI) -> None:
    """Answer every error of the application with a problem."""
    for kind in (PSCError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses=`` of a route that can answer with these problem statuses."""
    schema = {"$ref": "#/components/schemas/ProblemDocument"}
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {MEDIA_TYPE: {"schema": schema}},
            **({"headers": _RETRY_AFTER} if status == 429 else {}),
        }
        for status in statuses
    }


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope, request.app.state.service.metrics)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    slug, title = ROUTING.get(error.status_code, (f"http-{error.status_code}", "Request refused"))
    headers = error.headers or {}
    problem = Problem(error.status_code, TYPE_PREFIX + slug, title, str(error.detail), slug, headers)
    return _response(problem, request.scope, request.app.state.service.metrics)


async def _on_invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    detail = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    problem = Problem(400, f"{TYPE_PREFIX}malformed", "Malformed request", detail, "malformed")
    return _response(problem, request.scope, request.app.state.service.metrics)


_RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
_DESCRIPTIONS: Final = {
    400: "The body or a parameter does not follow this interface.",
    401: "API key missing or unknown.",
    403: "API key not allowed to do this.",
    404: "No model of this name.",
    408: "The body arrived too slowly.",
    409: "A reload is running.",
    413: "The body, the number of images or an image is too large.",
    415: "Not one of the three body forms, or not an image type that is read.",
    422: "An image, the bundle, or an alpha cannot be used.",
    429: "The queue is full; retry after the seconds of `Retry-After`.",
    500: "The network failed on an image, or an internal error.",
    503: "Not ready: warming up, draining, or the device failed.",
    504: "No answer before the deadline.",
}
