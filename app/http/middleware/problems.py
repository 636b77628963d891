"""Answer every error with a problem document, unless the answer has begun."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.problems import error_response
from app.observability.metrics import Metrics

logger = logging.getLogger("psc.http")


class ProblemResponses:
    """Turns exceptions into problem documents.

    Args:
        app: The wrapped ASGI application.
        metrics: The metrics in which errors are counted.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = complete = False

        async def watch(message: Message) -> None:
            nonlocal began, complete
            began = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            if not began:
                await error_response(error, scope, self._metrics)(scope, receive, send)
            elif not complete:
                logger.exception("a request failed while it was answered", exc_info=error)
                raise
