"""POST to a known path goes straight to what answers it, past the framework's routing and error layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send


class Shortcut(NamedTuple):
    """What a path leads to: its documented route, for metrics and traces, and the application that answers."""

    route: Any
    app: ASGIApp


class Shortcuts:
    """See the module.

    Args:
        app: Everything else.
        table: By path.
    """

    def __init__(self, app: ASGIApp, table: Mapping[str, Shortcut]) -> None:
        self.app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._table.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self.app(scope, receive, send)
        else:
            scope["route"] = found.route
            await found.app(scope, receive, send)
