"""The host allow-list, without the paths that machines ask by address: probes and Prometheus."""

from __future__ import annotations

from typing import Final

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Answered whatever the ``Host`` header says: an orchestrator's probe names an address, not a host."""


class HostAllowList(TrustedHostMiddleware):
    """Starlette's allow-list for every path but :data:`OPEN_PATHS`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
