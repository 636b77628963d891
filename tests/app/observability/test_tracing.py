"""Trace context: the header's grammar, the middleware, and OpenTelemetry where it is installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.middleware.requests import Requests
from app.observability.tracing import SpanMiddleware, TraceContext, begin_trace, current_trace
from app.service import Service
from app.settings import load_settings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f" 00-{TRACE}-{PARENT}-00 ", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-brings", True),
    ],
)
def test_a_valid_trace_is_continued(header: str, sampled: bool) -> None:
    trace = begin_trace(header)
    assert (trace.trace_id, trace.parent_id, trace.sampled) == (TRACE, PARENT, sampled)
    assert trace.span_id not in (PARENT, "0" * 16)
    assert trace.traceparent == f"00-{TRACE}-{trace.span_id}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-extra",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
    ],
)
def test_an_invalid_trace_starts_a_new_one(header: str | None) -> None:
    trace = begin_trace(header)
    assert trace.parent_id is None
    assert trace.trace_id != TRACE


@given(st.text(max_size=80))
def test_any_header_gives_a_context_that_parses_again(header: str) -> None:
    trace = begin_trace(header)
    again = begin_trace(trace.traceparent)
    assert (again.trace_id, again.parent_id) == (trace.trace_id, trace.span_id)


def serve(
    headers: list[tuple[bytes, bytes]], status: int = 200, *, spans: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One request; the trace that the application saw, and what was sent."""
    seen: dict[str, Any] = {}
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(trace=current_trace.get())
        await send({"type": "http.response.start", "status": status, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
    wrapped: Any = Requests(app, service=Service(load_settings(environment={}), None, {}))  # type: ignore[arg-type]
    asyncio.run((SpanMiddleware(wrapped) if spans else wrapped)(scope, receive, send))
    return seen, sent


def traceresponse(sent: list[dict[str, Any]]) -> TraceContext:
    return begin_trace(dict(sent[0]["headers"])[b"traceresponse"].decode())


def test_the_context_is_set_and_cleared() -> None:
    seen, sent = serve([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())])
    assert seen["trace"].trace_id == TRACE
    assert current_trace.get() is None
    assert traceresponse(sent).parent_id == seen["trace"].span_id
    assert sent[0]["headers"][0] == (b"x", b"y")


def test_without_export_no_span_is_opened_though_the_package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra psc[otel]")

    def explode(*_: Any) -> Any:
        raise AssertionError("a span was opened")

    monkeypatch.setattr(trace, "get_tracer", explode)
    _, sent = serve([])
    assert sent[0]["status"] == 200


def test_two_headers_are_as_good_as_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    seen, _ = serve([header, header])
    assert seen["trace"].trace_id != TRACE


def test_other_scopes_pass_through() -> None:
    pytest.importorskip("opentelemetry.trace", reason="needs the extra psc[otel]")
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["type"])

    asyncio.run(SpanMiddleware(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert calls == ["lifespan"]


def test_spans_are_recorded_with_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra psc[otel]")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = trace_sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    seen, sent = serve([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())], status=503, spans=True)
    span: Any
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == seen["trace"].trace_id == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.span_id:016x}" == seen["trace"].span_id == traceresponse(sent).parent_id
    assert span.attributes["http.response.status_code"] == 503
    assert not span.status.is_ok


def test_the_module_works_without_opentelemetry() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from app.observability.tracing import begin_trace, configure_export
from psc_core.errors import UsageError
assert begin_trace(None).traceparent.startswith("00-")
try:
    configure_export()
except UsageError as error:
    assert "psc[otel]" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra psc[otel]")
    code = """
import asyncio, http.server, os, threading

paths = []

class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        paths.append((self.path, b"POST /predict" in body, b"my-psc" in body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ["OTEL_EXPORTER_OTLP_COMPRESSION"] = "none"
os.environ["OTEL_SERVICE_NAME"] = "my-psc"

from types import SimpleNamespace
from opentelemetry import trace
from app.observability.tracing import SpanMiddleware, configure_export

async def app(scope, receive, send):
    scope["route"] = SimpleNamespace(path="/predict")
    await send({"type": "http.response.start", "status": 200, "headers": []})

async def send(message):
    pass

configure_export()
scope = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
asyncio.run(SpanMiddleware(app)(scope, None, send))
assert trace.get_tracer_provider().force_flush(10_000)
assert paths == [("/v1/traces", True, True)], paths
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
