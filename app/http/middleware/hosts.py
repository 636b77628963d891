"""The host allow-list, without probes: an orchestrator names an address, not a host."""

from __future__ import annotations

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from app.http.middleware.probes import is_probe


class HostAllowList(TrustedHostMiddleware):
    """Starlette's allow-list for every path but those of probes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_probe(scope["path"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
