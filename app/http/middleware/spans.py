"""An OpenTelemetry server span for each request, where traces are exported."""

from __future__ import annotations

import os
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.observability.tracing import TraceContext, begin_trace, current_trace, traceparent_of
from psc_core.errors import UsageError


class SpanMiddleware:
    """Pure ASGI middleware: one OpenTelemetry server span per HTTP request, its ids in :data:`current_trace`.

    Raises:
        ImportError: The OpenTelemetry extra is not installed; :func:`configure_export` says so in words.
    """

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.app = app
        self._otel: Any = trace
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        otel, method = self._otel, scope["method"]
        header = traceparent_of(scope["headers"])
        caller = begin_trace(header)
        context = None if caller.parent_id is None else self._propagator.extract({"traceparent": header})
        with otel.get_tracer("psc").start_as_current_span(method, context=context, kind=otel.SpanKind.SERVER) as span:
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


def check_installed() -> None:
    """Refuse to trace without the OpenTelemetry packages.

    Raises:
        UsageError: The OpenTelemetry extra is not installed.
    """
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"otel needs OpenTelemetry, but {error.name} is not installed; pip install 'psc[otel]' or switch otel off"
        ) from error


def configure_export() -> None:
    """Send spans by OTLP/HTTP; where to, and as which service, say the standard ``OTEL_*`` variables.

    Raises:
        UsageError: The OpenTelemetry extra is not installed.
    """
    check_installed()
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "psc")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
