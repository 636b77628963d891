"""The path under which a proxy publishes the service, told to everything that builds links."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Set the ASGI ``root_path``, for a proxy that strips it from the paths it passes on.

    Args:
        app: The application.
        path: For example ``/uncertainty``.
    """

    def __init__(self, app: ASGIApp, path: str) -> None:
        self.app = app
        self.path = path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope["root_path"] = self.path
        await self.app(scope, receive, send)
