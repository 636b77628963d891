"""Around every request: count and time it, refuse beyond ``max_requests``, answer crashes, close on drain."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import QueueFull, problem_of
from app.problems import problem_response

if TYPE_CHECKING:
    from app.service import Service

logger = logging.getLogger("psc.http")

_UNWATCHED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that are answered however many requests are in flight."""


class Requests:
    """See the module.

    Args:
        app: What is wrapped.
        service: Whose metrics and counters are kept.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self.service = service
        self._access_log = service.settings.access_log
        self._max_requests = service.settings.max_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service = self.service
        began = time.perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if service.draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        service.inflight += 1
        try:
            if service.inflight > self._max_requests and scope["path"] not in _UNWATCHED:
                await self._refuse(scope, receive, watched)
            else:
                await self.app(scope, receive, watched)
        except Exception as error:
            logger.exception("a request failed", exc_info=error)
            if status:
                raise
            await problem_response(problem_of(error))(scope, receive, watched)
        finally:
            service.inflight -= 1
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "unmatched")
            service.metrics.request(route, status, seconds)
            if self._access_log:
                self._log(scope, status, seconds)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = QueueFull(f"expected at most {self._max_requests} requests at once; try again in 1 s", retry_after=1)
        self.service.metrics.rejected("too-many-requests")
        await problem_response(problem_of(error))(scope, receive, send)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope.get("client")
        extra = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            "client": client[0] if client else None,
        }
        logger.info("request", extra=extra)
