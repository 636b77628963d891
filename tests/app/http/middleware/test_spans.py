"""OpenTelemetry spans, where the packages are installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from app.http.middleware.spans import SpanMiddleware
from app.observability.tracing import current_trace

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def test_other_scopes_pass_through() -> None:
    pytest.importorskip("opentelemetry.trace", reason="needs the extra psc[otel]")
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["type"])

    asyncio.run(SpanMiddleware(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert calls == ["lifespan"]


def test_span_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra psc[otel]")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = trace_sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(trace=current_trace.get())
        await send({"type": "http.response.start", "status": 503, "headers": []})

    async def send(message: Any) -> None:
        pass

    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
    asyncio.run(SpanMiddleware(app)(scope, None, send))  # type: ignore[arg-type]
    span: Any
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == seen["trace"].trace_id == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.span_id:016x}" == seen["trace"].span_id
    assert span.attributes["http.response.status_code"] == 503
    assert not span.status.is_ok
    assert current_trace.get() is None


def test_works_without_opentelemetry() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from app.http.middleware.spans import configure_export
from app.observability.tracing import begin_trace
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
from app.http.middleware.spans import SpanMiddleware, configure_export

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
