"""W3C trace context, and an OpenTelemetry span per request when that package is installed.

``traceparent`` (https://www.w3.org/TR/trace-context/) is ``version-traceid-parentid-flags`` in lower-case
hex, 2-32-16-2 digits.  A valid one is continued (same trace id, new span id); a missing or malformed one
starts a new trace, as the specification asks.  Without the ``opentelemetry`` package, or without a
configured exporter, nothing is recorded and the ids still tie log lines and answers together.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from psc_core.errors import UsageError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_otel: Any
try:
    from opentelemetry import trace as _otel
except ImportError:
    _otel = None

_PATTERN: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01


@dataclass(frozen=True)
class TraceContext:
    """Where this request stands in its trace.

    Attributes:
        trace_id: 32 hex digits, shared by the whole trace.
        span_id: 16 hex digits, this request's own.
        parent_id: 16 hex digits of the caller's span, or ``None`` where the trace begins here.
        sampled: Whether the caller (or, at the start of a trace, this service) records the trace.
    """

    trace_id: str
    span_id: str
    parent_id: str | None = None
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The header value that hands this span on as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


current_trace: ContextVar[TraceContext | None] = ContextVar("psc_trace", default=None)
"""The request's trace context, for log records; ``None`` outside a request."""


def begin_trace(traceparent: str | None) -> TraceContext:
    """Continue the caller's trace, or start one when the header is missing or malformed."""
    match = _PATTERN.fullmatch(traceparent.strip()) if traceparent else None
    if match:
        version, trace_id, parent_id, flags, rest = match.groups()
        known_length = version != "00" or rest is None
        if version != "ff" and known_length and int(trace_id, 16) and int(parent_id, 16):
            sampled = bool(int(flags, 16) & _SAMPLED)
            return TraceContext(trace_id, _new_id(8), parent_id, sampled)
    return TraceContext(_new_id(16), _new_id(8))


class TraceMiddleware:
    """Pure ASGI middleware: one trace context, and with OpenTelemetry one server span, per HTTP request.

    The context is in :data:`current_trace` while the application runs, and in ``scope["state"]["trace"]``;
    every answer carries it as ``traceresponse`` (same form as ``traceparent``).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        trace = begin_trace(_traceparent(scope["headers"]))
        if _otel is None:
            await self._serve(trace, scope, receive, send, lambda status: None)
        else:
            await self._serve_in_span(trace, scope, receive, send)

    async def _serve(
        self,
        trace: TraceContext,
        scope: Scope,
        receive: Receive,
        send: Send,
        on_status: Callable[[int], None],
    ) -> None:
        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                on_status(message["status"])
                header = (b"traceresponse", trace.traceparent.encode("ascii"))
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        scope.setdefault("state", {})["trace"] = trace
        token = current_trace.set(trace)
        try:
            await self.app(scope, receive, send_traced)
        finally:
            current_trace.reset(token)

    async def _serve_in_span(self, trace: TraceContext, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        with _otel.get_tracer("psc").start_as_current_span(
            method, context=_parent_context(trace), kind=_otel.SpanKind.SERVER
        ) as span:
            recorded = span.get_span_context()
            if span.is_recording():
                trace = TraceContext(
                    f"{recorded.trace_id:032x}",
                    f"{recorded.span_id:016x}",
                    trace.parent_id,
                    recorded.trace_flags.sampled,
                )
                span.set_attribute("http.request.method", method)
                span.set_attribute("url.path", scope["path"])

            def on_status(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(_otel.StatusCode.ERROR)

            await self._serve(trace, scope, receive, send, on_status)
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)


def configure_export() -> None:
    """Send spans by OTLP/HTTP; where to, and as which service, say the standard ``OTEL_*`` variables.

    Raises:
        UsageError: The OpenTelemetry extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            f"expected the OpenTelemetry packages for otel = true, got no {error.name}; "
            "pip install 'psc[otel]' or switch otel off"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "psc")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _otel.set_tracer_provider(provider)


def _parent_context(trace: TraceContext) -> Any:
    """The caller's span as an OpenTelemetry context; ``None`` (the ambient context) without a caller."""
    if trace.parent_id is None:
        return None
    parent = _otel.SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.parent_id, 16),
        is_remote=True,
        trace_flags=_otel.TraceFlags(_SAMPLED if trace.sampled else 0),
    )
    return _otel.set_span_in_context(_otel.NonRecordingSpan(parent))


def _traceparent(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The one ``traceparent`` header; several are as good as none."""
    found = [value for name, value in headers if name == b"traceparent"]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _new_id(size_bytes: int) -> str:
    """Random hex id that is not all zeros."""
    while True:
        value = secrets.token_hex(size_bytes)
        if int(value, 16):
            return value
