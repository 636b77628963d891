"""Around every request: its trace, its count and time, the limits on bodies and requests, the answer to an error.

One object for each request carries what the layers of a usual stack would, and wraps ``receive`` and ``send``
once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLarge, QueueFull, TooManyRequests
from app.middleware.probes import is_probe
from app.problems import error_response
from app.tracing import TraceContext, begin_trace, current_trace, traceparent_of

if TYPE_CHECKING:
    from app.service import Service

logger = logging.getLogger("psc.http")


class Requests:
    """See the module.

    Args:
        app: What is wrapped.
        service: Whose settings hold, and whose metrics and counters are kept.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self.service = service
        self.buffered_bytes = 0
        settings = service.settings
        self._access_log = settings.access_log
        self._max_requests = settings.max_requests
        self._max_bytes = settings.max_body_bytes
        self._max_buffered_bytes = settings.max_buffered_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service = self.service
        began = time.perf_counter()
        trace, token = current_trace.get(), None
        if trace is None:
            trace = begin_trace(traceparent_of(scope["headers"]))
            token = current_trace.set(trace)
        exchange = _Exchange(self, receive, send, trace)
        service.inflight += 1
        try:
            self._check(scope)
            await self.app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if not exchange.status:
                await error_response(error, scope, service.metrics)(scope, receive, exchange.send)
            elif not exchange.complete:
                logger.exception("a request failed while it was answered", exc_info=error)
                raise
        finally:
            service.inflight -= 1
            self.buffered_bytes -= exchange.received_bytes
            seconds = time.perf_counter() - began
            service.metrics.request(getattr(scope.get("route"), "path", "unmatched"), exchange.status, seconds)
            if self._access_log:
                _log(scope, exchange.status, seconds)
            if token is not None:
                current_trace.reset(token)

    def count(self, received_bytes: int, more_bytes: int) -> None:
        """Check a request's body bytes so far, and with them those of all requests.

        Raises:
            BodyTooLarge: More than one request may send.
            QueueFull: More than all requests together may send.
        """
        self.buffered_bytes += more_bytes
        if received_bytes > self._max_bytes:
            raise self._too_large("more")
        if self.buffered_bytes > self._max_buffered_bytes:
            raise QueueFull(
                f"expected at most {self._max_buffered_bytes} bytes of bodies at once; try again in 1 s", retry_after=1
            )

    def _check(self, scope: Scope) -> None:
        """Refuse what need not be read to be refused."""
        if self.service.inflight > self._max_requests and not is_probe(scope["path"]):
            raise TooManyRequests(
                f"expected at most {self._max_requests} requests at once; try again in 1 s", retry_after=1
            )
        announced = _announced_bytes(scope["headers"])
        if announced > self._max_bytes:
            raise self._too_large(f"{announced}")

    def _too_large(self, got: str) -> BodyTooLarge:
        return BodyTooLarge(f"expected a body of at most {self._max_bytes} bytes, got {got}; send less")


class _Exchange:
    """One request: bytes it has sent, status of its answer (0 before there is one), whether that is all sent."""

    __slots__ = ("_receive", "_requests", "_send", "_trace", "complete", "received_bytes", "status")

    def __init__(self, requests: Requests, receive: Receive, send: Send, trace: TraceContext) -> None:
        self._requests = requests
        self._receive = receive
        self._send = send
        self._trace = trace
        self.received_bytes = 0
        self.status = 0
        self.complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.received_bytes += size
            self._requests.count(self.received_bytes, size)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"traceresponse", self._trace.traceparent.encode("ascii"))]
            if self._requests.service.draining:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        else:
            self.complete = not message.get("more_body", False)
        await self._send(message)


def _announced_bytes(headers: Sequence[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _log(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    extra = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
        "client": client[0] if client else None,
    }
    logger.info("request", extra=extra)
