"""Limit the number of concurrent requests, the body of each, and the memory of all bodies.

A compressed body is refused here, before any route reads it: its size after inflation has no limit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLarge, TooManyRequests, UnsupportedEncoding
from app.memory import COPIES
from app.service import Service

_CALLS: Final = {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")}
_PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready", *_CALLS})
_LARGE_BYTES: Final = 1 << 20
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD"})
_PROBE_OF_MODEL: Final = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/ready")


def is_probe(path: str) -> bool:
    """Return whether orchestrators or Prometheus probe this path; they ask by address, even of a busy service."""
    return path in _PROBES or (path.endswith("/ready") and _PROBE_OF_MODEL.fullmatch(path) is not None)


class RequestLimits:
    """Limits the number of concurrent requests and the bytes of their bodies.

    Args:
        app: The wrapped ASGI application.
        service: The service whose settings apply, and whose ``inflight`` is kept up to date.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self._service = service
        self._max_requests = service.settings.max_requests
        self._max_bytes = service.settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._service.inflight += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._service.inflight -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service.inflight > self._max_requests and not is_probe(scope["path"]):
            raise TooManyRequests(f"more than {self._max_requests} requests at once; try again in 1 s", retry_after=1)
        if scope["method"] not in _WITHOUT_BODY:
            _check_encoding(scope["headers"])
        announced = _announced_bytes(scope["headers"])
        if announced > self._max_bytes:
            raise self._too_large(f"{announced} bytes" if announced != sys.maxsize else "more")
        memory, received, taken = self._service.memory, 0, 0
        if announced > _LARGE_BYTES:  # Refused before it is read, so that bodies that are arriving find room.
            memory.check(COPIES * announced)

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

        try:
            await self.app(scope, receive_counted, send)
        finally:
            memory.give(taken)

    def _too_large(self, got: str) -> BodyTooLarge:
        return BodyTooLarge(f"expected a body of at most {self._max_bytes} bytes, got {got}; send less")


def _check_encoding(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuse a body with a content coding; ``identity`` is none."""
    for name, value in headers:
        if name == b"content-encoding":
            given = value.decode("latin-1")
            if any(coding.strip().lower() not in ("", "identity") for coding in given.split(",")):
                raise UnsupportedEncoding(
                    f"expected an uncompressed body, got Content-Encoding: {given[:64]}; send it without"
                )


def _announced_bytes(headers: Sequence[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                return 0
            digits = value.lstrip(b"0") or b"0"  # int() raises ValueError for more than 4,300 digits.
            return int(digits) if len(digits) < 20 else sys.maxsize
    return 0
