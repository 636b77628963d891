"""Trace, count, time and, if asked for, log every request."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.observability.tracing import current_trace, trace_of_request
from app.service import Service
from psc_core.errors import shortened

logger = logging.getLogger("psc.http")


class Telemetry:
    """Traces, counts and times each request.

    Args:
        app: The wrapped ASGI application.
        service: The service whose metrics are updated.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self._service = service
        self._access_log = service.settings.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, began, status = self._service, time.perf_counter(), 0
        trace = trace_of_request(scope["headers"])
        token = current_trace.set(trace)

        async def send_with_trace(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"traceresponse", trace.traceparent.encode("ascii"))]
                message["headers"] = headers
            await send(message)

        try:
            await self.app(scope, receive, send_with_trace)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "unmatched")
            service.metrics.psc_request_seconds.labels(route=route, status=str(status)).observe(seconds)
            if self._access_log:
                _log(scope, status, seconds)
            current_trace.reset(token)


def _log(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    extra = {
        "method": scope["method"],
        "path": shortened(scope["path"]),
        "status": status,
        "seconds": round(seconds, 6),
        "client": shortened(client[0]) if client else None,
    }
    logger.info("request", extra=extra)
