"""Ask the clients of a service that is about to end to connect elsewhere next time."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.service import Service


class Draining:
    """Answers with ``Connection: close`` while the service drains.

    Args:
        app: The wrapped ASGI application.
        service: The service, which knows whether it is draining.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self._service.draining and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive, send_last)
