"""W3C trace context, and an OpenTelemetry span per request where traces are exported.

``traceparent`` (https://www.w3.org/TR/trace-context/) is ``version-traceid-parentid-flags`` in lower-case
hex, 2-32-16-2 digits.  A valid one is continued (same trace id, new span id); a missing or malformed one
starts a new trace, as the specification asks.  Without an exporter nothing is recorded and the ids still
tie log lines and answers together.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from psc_core.errors import UsageError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_PATTERN: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01
_ids: Final = random.Random()  # Ids must be unlikely to meet, not hard to guess.


class TraceContext(NamedTuple):
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
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


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
            return TraceContext(trace_id, _new_id(64), parent_id, sampled)
    return TraceContext(_new_id(128), _new_id(64))


def traceparent_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The one ``traceparent`` header; several are as good as none."""
    found = [value for name, value in headers if name == b"traceparent"]
    return found[0].decode("latin-1") if len(found) == 1 else None


class SpanMiddleware:
    """Pure ASGI middleware: one OpenTelemetry server span per HTTP request, its ids in :data:`current_trace`.

    Raises:
        ImportError: The OpenTelemetry extra is not installed; :func:`configure_export` says so in words.
    """

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry import trace

        self.app = app
        self._otel: Any = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        otel, method = self._otel, scope["method"]
        caller = begin_trace(traceparent_of(scope["headers"]))
        with otel.get_tracer("psc").start_as_current_span(
            method, context=self._parent_context(caller), kind=otel.SpanKind.SERVER
        ) as span:
            recorded = span.get_span_context()
            span.set_attribute("http.request.method", method)
            span.set_attribute("url.path", scope["path"])

            async def send_told(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(otel.StatusCode.ERROR)
                await send(message)

            token = current_trace.set(
                TraceContext(
                    f"{recorded.trace_id:032x}",
                    f"{recorded.span_id:016x}",
                    caller.parent_id,
                    recorded.trace_flags.sampled,
                )
                if recorded.is_valid
                else caller
            )
            try:
                await self.app(scope, receive, send_told)
            finally:
                current_trace.reset(token)
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)

    def _parent_context(self, caller: TraceContext) -> Any:
        """The caller's span as an OpenTelemetry context; ``None`` (the ambient context) without a caller."""
        if caller.parent_id is None:
            return None
        otel = self._otel
        parent = otel.SpanContext(
            trace_id=int(caller.trace_id, 16),
            span_id=int(caller.parent_id, 16),
            is_remote=True,
            trace_flags=otel.TraceFlags(_SAMPLED if caller.sampled else 0),
        )
        return otel.set_span_in_context(otel.NonRecordingSpan(parent))


def configure_export() -> None:
    """Send spans by OTLP/HTTP; where to, and as which service, say the standard ``OTEL_*`` variables.

    Raises:
        UsageError: The OpenTelemetry extra is not installed.
    """
    try:
        from opentelemetry import trace
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
    trace.set_tracer_provider(provider)


def _new_id(bits: int) -> str:
    """Random hex id that is not all zeros."""
    return f"{_ids.getrandbits(bits) or 1:0{bits // 4}x}"
