"""Errors become problem documents unless an answer has begun."""

from __future__ import annotations

from typing import Any

import pytest

from app.http.middleware import ProblemResponses
from app.metrics import Metrics
from tests.app.fakes import png
from tests.app.http.support import check_problem
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


async def test_an_internal_error_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as app:

        def explode(*_: Any, **__: Any) -> Any:
            raise RuntimeError("secret detail")

        object.__setattr__(app.service.registry.get(), "predict", explode)
        response = await app.client.post("/predict", content=png(1), headers=PNG)
        check_problem(response, 500, "internal")
        assert "secret" not in response.text
        assert "secret detail" in caplog.text


SCOPE = {"type": "http", "path": "/predict", "headers": []}


async def send_through(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What is sent when an application sends these messages and then fails."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        raise RuntimeError("too late")

    async def send(message: Any) -> None:
        sent.append(message)

    await ProblemResponses(app, metrics=Metrics())(SCOPE, None, send)  # type: ignore[arg-type]
    return sent


async def test_error_before_the_answer() -> None:
    start, _ = await send_through()
    assert start["status"] == 500


async def test_error_within_the_answer_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="too late"):
        await send_through({"type": "http.response.start", "status": 200, "headers": []})
    assert "failed while it was answered" in caplog.text


async def test_error_after_the_answer_is_dropped() -> None:
    messages = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": b"x"},
    ]
    assert await send_through(*messages) == messages
