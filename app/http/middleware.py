"""Limits, errors, draining and telemetry around every route; pure ASGI, as ``BaseHTTPMiddleware`` hides disconnects."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Final, Protocol, runtime_checkable

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import MEDIA_TYPE, BodyTooLarge, TooManyRequests, UnsupportedEncoding, error_response, make_problem
from app.http.v2 import HEADER
from app.memory import COPIES, MemoryBudget
from app.metrics import Metrics
from app.service import Service
from app.settings import Settings
from app.tracing import current_trace, record_front, trace_of_request
from psc_core.errors import shorten

_CALLS: Final = {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")}
_PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready", *_CALLS})
_LARGE_BYTES: Final = 1 << 20
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD"})
MODEL_READY: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/ready")


def is_probe(path: str) -> bool:
    """Return whether orchestrators or Prometheus probe this path; they ask by address, even of a busy service."""
    return path in _PROBES or (path.endswith("/ready") and MODEL_READY.fullmatch(path) is not None)


@runtime_checkable
class Limited(Protocol):
    """A service, or a front of one."""

    settings: Settings
    memory: MemoryBudget
    inflight: int  # the number of requests that are being answered


class RequestLimits:
    """Limits the number of concurrent requests, the body of each, and the memory of all bodies.

    A compressed body is refused before any route reads it: its size after inflation has no limit.
    """

    def __init__(self, app: ASGIApp, *, service: Limited) -> None:
        self.app = app
        self._service = service  # whose settings apply, and whose ``inflight`` is kept up to date
        self._max_bytes = service.settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        memory, received, taken = self._service.memory, 0, 0

        async def receive_counted() -> Message:
            nonlocal received, taken
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                received += size
                if received > self._max_bytes:
                    raise self._too_large("more")
                if size:
                    memory.take(COPIES * size)
                    taken += COPIES * size
            return message

        self._service.inflight += 1
        try:
            self._check(scope)
            await self.app(scope, receive_counted, send)
        finally:
            self._service.inflight -= 1
            memory.give(taken)

    def _check(self, scope: Scope) -> None:
        """Refuse what the head alone shows to be too much."""
        if not is_probe(scope["path"]):
            check_count(self._service)
        if scope["method"] not in _WITHOUT_BODY:
            _check_encoding(scope["headers"])
        announced = announced_bytes(scope["headers"])
        if announced > self._max_bytes:
            raise self._too_large(f"{announced} bytes" if announced != sys.maxsize else "more")
        if announced > _LARGE_BYTES:  # Refused before it is read, so that bodies that are arriving find room.
            self._service.memory.check(COPIES * announced)

    def _too_large(self, got: str) -> BodyTooLarge:
        return BodyTooLarge(f"expected a body of at most {self._max_bytes} bytes, got {got}; send less")


def check_count(service: Limited) -> None:
    """Refuse a request, which counts already, if there are too many at once."""
    most = service.settings.max_requests
    if service.inflight > most:
        raise TooManyRequests(f"more than {most} requests at once; try again in 1 s", retry_after=1)


def _check_encoding(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuse a body with a content coding; ``identity`` is none."""
    for name, value in headers:
        if name == b"content-encoding":
            given = value.decode("latin-1")
            if any(coding.strip().lower() not in ("", "identity") for coding in given.split(",")):
                raise UnsupportedEncoding(
                    f"expected an uncompressed body, got Content-Encoding: {given[:64]}; send it without"
                )


def announced_bytes(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the length of a body as its head says; 0 if it does not."""
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                return 0
            digits = value.lstrip(b"0") or b"0"  # int() raises ValueError for more than 4,300 digits.
            return int(digits) if len(digits) < 20 else sys.maxsize
    return 0


class HostAllowList(TrustedHostMiddleware):
    """The allow-list of hosts; probes, which name an address, and gRPC, which no web page speaks, are exempt."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope.get("scheme") == "grpc" or is_probe(scope["path"])):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class ProblemCORS(CORSMiddleware):
    """Starlette's CORS, except that a refused preflight request is answered with a problem document."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "traceresponse", HEADER],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != HTTPStatus.BAD_REQUEST:
            return response
        detail = f"{bytes(response.body).decode()}; allow it with the setting cors_origins"
        problem = make_problem((response.status_code, "cors", "Cross-origin request refused"), detail)
        del response.headers["content-length"], response.headers["content-type"]
        body = problem.model_dump_json(exclude_none=True).encode()
        return Response(body, response.status_code, dict(response.headers), media_type=MEDIA_TYPE)


logger = logging.getLogger("psc.http")


class ProblemResponses:
    """Turns exceptions into problem documents."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = complete = False

        async def watch(message: Message) -> None:
            nonlocal began, complete
            began = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            if not began:
                await error_response(error, scope, self._metrics)(scope, receive, send)
            elif not complete:
                logger.exception("a request failed while it was answered", exc_info=error)
                raise


class Telemetry:
    """Traces, counts and times each request, and answers with ``Connection: close`` while the service drains."""

    def __init__(self, app: ASGIApp, *, service: Service, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._service = service
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, began, status = self._service, scope.get("began") or time.perf_counter(), 0
        trace = trace_of_request(scope["headers"])
        token = current_trace.set(trace)
        if service.settings.otel and "began" in scope:
            record_front(began)

        async def send_with_trace(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own_headers(service, trace)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_trace)
        finally:
            matching = (each for each in self._routes if each.matches(scope)[0] is Match.FULL)
            route = scope.get("route") or next(matching, None)  # It was refused before it came to one.
            note_request(service, scope, getattr(route, "path", "unmatched"), status, began)
            current_trace.reset(token)


def own_headers(service: Service, trace: str) -> list[tuple[bytes, bytes]]:
    """Return the headers that every answer has."""
    last = [(b"connection", b"close")] if service.draining else []
    return [*last, (b"traceresponse", trace.encode("ascii"))]


def note_request(service: Service, scope: Scope, route: str, status: int, began: float) -> None:
    """Count and time a request that was answered, and log it if the settings say so."""
    seconds = time.perf_counter() - began
    service.metrics.psc_request_seconds.labels(route=route, status=str(status)).observe(seconds)
    if service.settings.access_log:
        (address, _), path = scope.get("client") or (None, 0), shorten(scope["path"])
        extra = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
        logger.info("request", extra={**extra, "client": address and shorten(address)})


class DirectRoutes:
    """Calls endpoints that take the request and give the response without FastAPI's layers, which do nothing for them.

    Only a path without parameters is found here; the other routes, and other methods, are FastAPI's.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self.app = app
        self._routes = {
            route.path: route for route in routes if isinstance(route, APIRoute) and not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] not in (route.methods or ()):
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive))
        await response(scope, receive, send)
