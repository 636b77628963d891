"""The trace of every request, its count and time, and the access log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from app.http.middleware import Telemetry
from app.main import make_service
from app.service import Host
from app.settings import load_settings
from app.tracing import current_trace
from tests.app.support import running

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def serve(headers: list[tuple[bytes, bytes]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One request; the trace that the application saw, and what was sent."""
    seen: dict[str, Any] = {}
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(trace=current_trace.get())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
    unused = None
    service = make_service(load_settings(), {}, Host())
    asyncio.run(Telemetry(app, service=service)(scope, unused, send))  # type: ignore[arg-type]
    return seen, sent


def test_context_is_set_and_cleared() -> None:
    seen, sent = serve([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())])
    assert seen["trace"].trace_id == TRACE
    assert current_trace.get() is None
    assert dict(sent[0]["headers"])[b"traceresponse"].decode() == seen["trace"].traceparent
    assert sent[0]["headers"][0] == (b"x", b"y")


def test_two_headers_are_as_good_as_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    seen, _ = serve([header, header])
    assert seen["trace"].trace_id != TRACE


def test_opens_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra psc[otel]")

    def explode(*_: Any) -> Any:
        raise AssertionError("a span was opened")

    monkeypatch.setattr(trace, "get_tracer", explode)
    _, sent = serve([])
    assert sent[0]["status"] == 200


@pytest.mark.anyio
@pytest.mark.parametrize("access_log", [True, False])
async def test_access_log(caplog: pytest.LogCaptureFixture, access_log: bool) -> None:
    caplog.set_level(logging.INFO)
    async with running(access_log=access_log) as app:
        await app.client.get("/healthz")
    records = [vars(record) for record in caplog.records if record.message == "request"]
    assert [(record["method"], record["path"], record["status"]) for record in records] == (
        [("GET", "/healthz", 200)] if access_log else []
    )


@pytest.mark.anyio
async def test_the_trace_id_is_continued_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(access_log=True) as app:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        response = await app.client.get("/healthz", headers=headers)
        assert response.headers["traceresponse"].split("-")[1] == trace_id
        record = next(record for record in caplog.records if record.message == "request")
        assert vars(record)["path"] == "/healthz"
        assert vars(record)["status"] == 200


@pytest.mark.anyio
async def test_unknown_paths_and_methods_are_problems_under_one_metric() -> None:
    async with running() as app:
        for method, path, status in (("GET", "/x", 404), ("GET", "/predict", 405), ("GET", "/" + "y" * 50, 404)):
            response = await app.client.request(method, path)
            assert response.status_code == status
            assert response.headers["content-type"] == "application/problem+json"
        assert await app.metric('psc_request_seconds_count{route="unmatched",status="404"}') == 2
