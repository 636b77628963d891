"""The grammar of the trace context header, and the spans that are exported."""

import json
import logging
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from app.tracing import JsonFormatter, TerminalFormatter, begin_trace, configure_export, current_trace, trace_of_request
from psc_core.errors import UsageError
from tests.app.fakes import png
from tests.app.support import PNG, running

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
def test_continues_a_valid_trace(header: str, sampled: bool) -> None:
    trace = begin_trace(header)
    _, _, span_id, _ = trace.split("-")
    assert len(span_id) == 16 and span_id not in (PARENT, "0" * 16)
    assert trace == f"00-{TRACE}-{span_id}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "garbage", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"),
        *(f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-extra", f"00-{TRACE}-{PARENT}"),
        f"00-{TRACE}-{PARENT}-1",
    ],
)
def test_invalid_header_starts_a_new_trace(header: str | None) -> None:
    version, trace_id, span_id, flags = begin_trace(header).split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")
    assert trace_id not in (TRACE, "0" * 32)


def test_two_headers_are_as_good_as_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    assert trace_of_request([(b"x", b"y"), header]).split("-")[1] == TRACE
    assert trace_of_request([header, header]).split("-")[1] != TRACE
    assert trace_of_request([]).split("-")[1] != TRACE


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    trace_sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra psc[otel]")
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = trace_sdk.TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(kept, schedule_delay_millis=3_600_000))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    monkeypatch.setattr("app.tracing.configure_export", lambda: None)
    return kept


@pytest.mark.anyio
@pytest.mark.parametrize("status", [200, 503])
async def test_each_request_has_one_span(exporter: Any, status: int) -> None:
    async with running(otel=True) as app:
        if status == 503:
            app.service.registry.get("m").engine.stop_admitting("closed")
        headers = {**PNG, "traceparent": f"00-{TRACE}-{PARENT}-01"}
        response = await app.client.post("/predict", content=png(0), headers=headers)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind.name) == ("POST /predict", "SERVER")
    assert f"{span.parent.span_id:016x}" == PARENT
    assert response.headers["traceresponse"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert span.attributes["http.route"] == "/predict"
    assert span.attributes["http.response.status_code"] == response.status_code == status
    assert span.status.is_ok == (status == 200)


@pytest.mark.anyio
async def test_the_time_in_a_front_is_a_span(exporter: Any) -> None:
    async with running(otel=True) as app:

        async def from_front(scope: Any, receive: Any, send: Any) -> None:
            await app.app({**scope, "began": time.perf_counter() - 7.0}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(from_front), base_url="http://test") as client:
            await client.post("/predict", content=png(0), headers=PNG)
    front, request = exporter.get_finished_spans()
    assert front.parent.span_id == request.context.span_id
    assert front.end_time - front.start_time >= 7e9
    assert front.end_time <= request.end_time


@pytest.mark.anyio
async def test_no_spans_unless_asked_for(exporter: Any) -> None:
    async with running() as app:
        assert (await app.client.get("/healthz")).status_code == 200
    assert not exporter.get_finished_spans()


def test_the_exporter_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError, match=r"psc\[otel\]"):
        configure_export()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "psc"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=flowers"}, "flowers"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=flowers", "OTEL_SERVICE_NAME": "digits"}, "digits"),
    ],
)
def test_the_standard_variables_name_the_service(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra psc[otel]")
    for variable in ("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    made: list[Any] = []
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", made.append)
    configure_export()
    made[0].shutdown()
    assert made[0].resource.attributes["service.name"] == name


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra psc[otel]")
    code = """
import asyncio, http.server, os, threading

paths = []

class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        paths.append((self.path, b"GET /healthz" in body, b"my-psc" in body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ["OTEL_EXPORTER_OTLP_COMPRESSION"] = "none"
os.environ["OTEL_SERVICE_NAME"] = "my-psc"

from opentelemetry import trace
from tests.app.support import running

async def request():
    async with running(otel=True) as app:
        await app.client.get("/healthz")

asyncio.run(request())
assert trace.get_tracer_provider().force_flush(10_000)
assert paths == [("/v1/traces", True, True)], paths
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_log_lines_are_json_with_the_trace_id() -> None:
    record = logging.LogRecord("psc.x", logging.INFO, "f", 1, "hello %s", ("you",), None)
    record.model = "m"
    token = current_trace.set(begin_trace("00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    try:
        line = json.loads(JsonFormatter().format(record))
    finally:
        current_trace.reset(token)
    assert line["message"] == "hello you"
    assert line["level"] == "info"
    assert line["model"] == "m"
    assert line["trace_id"] == "a" * 32
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("psc.x", logging.ERROR, "f", 1, "bad", (), (ValueError, error, None))
    assert "ValueError: x" in json.loads(JsonFormatter().format(record))["exception"]


def test_a_terminal_gets_plain_lines() -> None:
    attributes = {"msg": "%s: drift alarm", "args": ("digits",), "window_ood_rate": 0.2}
    lines = [
        TerminalFormatter().format(logging.makeLogRecord({**attributes, "levelno": level, "levelname": name}))
        for level, name in ((logging.INFO, "INFO"), (logging.WARNING, "WARNING"))
    ]
    assert lines == ["digits: drift alarm (window_ood_rate=0.2)", "Warning: digits: drift alarm (window_ood_rate=0.2)"]


def test_nothing_commands_the_terminal() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError as error:
        caught = (ValueError, error, error.__traceback__)
    path = "/\x1b[2J\x1b]0;pwned\x07\nError: disk full\u202e\x9b31m"
    record = logging.makeLogRecord(
        {"msg": "request %s", "args": (path,), "levelno": logging.INFO, "path": path, "exc_info": caught}
    )
    first, *trace = TerminalFormatter().format(record).split("\n")
    assert first.count("Error: disk full") == 2 and trace[0].startswith("Traceback") and "ValueError" in trace[-1]
    assert all(each.isprintable() for each in [first, *trace])


def test_no_level_logs_what_images_hold() -> None:
    code = """
import logging.config, sys
from PIL import Image, PngImagePlugin
from app.tracing import log_config
from psc_core.images.decode import decode_image
from tests.encoded import encode

logging.config.dictConfig(log_config("debug", is_terminal=bool(int(sys.argv[1]))))
image, texts = Image.new("L", (8, 8)), PngImagePlugin.PngInfo()
texts.add_text("Author", "Jane Roe")
exif = image.getexif()
exif[0x13B] = "Jane Roe"
for data in (
    encode(image, "TIFF", tiffinfo={269: "jane_roe.tif", 270: "Jane Roe"}),
    encode(image, "JPEG", exif=exif),
    encode(image, pnginfo=texts),
):
    decode_image(data)
logging.getLogger("psc.images").debug("own line")
"""
    for is_terminal in "01":
        command = [sys.executable, "-c", code, is_terminal]
        lines = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stderr.splitlines()
        assert len(lines) == 1 and "own line" in lines[0]
