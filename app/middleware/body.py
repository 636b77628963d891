"""Limits on request bodies: bytes of one request, and bytes held for all requests together."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLarge, QueueFull, problem_of
from app.problems import problem_response


class BodyLimit:
    """Counts body bytes as they arrive; ``receive`` raises when a limit is passed.

    Args:
        app: What is wrapped.
        max_bytes: Largest body; a larger ``Content-Length`` is refused before a byte is read.
        max_buffered_bytes: Most bytes received for requests that are still being answered.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_buffered_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_buffered_bytes = max_buffered_bytes
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            problem = problem_of(self._too_large(f"{int(announced)}"))
            scope["app"].state.service.metrics.rejected(problem.reason)
            await problem_response(problem)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                received += size
                self._buffered += size
                if received > self.max_bytes:
                    raise self._too_large("more")
                if self._buffered > self.max_buffered_bytes:
                    raise QueueFull(
                        f"expected at most {self.max_buffered_bytes} bytes of bodies at once; try again in 1 s",
                        retry_after=1,
                    )
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self._buffered -= received

    def _too_large(self, got: str) -> BodyTooLarge:
        return BodyTooLarge(f"expected a body of at most {self.max_bytes} bytes, got {got}; send less")
