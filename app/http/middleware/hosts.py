"""The host allow-list, without probes, which name an address, and gRPC, which no page in a browser can speak."""

from __future__ import annotations

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from app.http.middleware.probes import is_probe


class HostAllowList(TrustedHostMiddleware):
    """Starlette's allow-list for every request but probes and calls of gRPC."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope.get("scheme") == "grpc" or is_probe(scope["path"])):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
