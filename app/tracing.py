"""Tie log lines and answers to a caller's trace by ids, and export spans.

A valid ``traceparent`` (https://www.w3.org/TR/trace-context/) is continued: same trace id, new span id.  Without one,
or with several, a new trace begins.  FastAPI makes the spans; if they are exported, their ids are used.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from psc_core.errors import needs
from psc_core.text import in_one_line

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_ids: Final = random.Random()  # Not ``secrets``: ids must not collide, but may be guessed.
os.register_at_fork(after_in_child=_ids.seed)


# The trace of the current request, for log records; ``None`` outside a request.  It is the header ``traceparent`` that
# names the request's span as the parent: 00-, 32 hex digits of the trace, 16 of the span, and whether it is recorded.
current_trace: ContextVar[str | None] = ContextVar("psc_trace", default=None)


def trace_of_request(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the trace of the request's span if one is recorded, else that of its headers."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        return _traceparent(span.trace_id, span.span_id, span.trace_flags.sampled)
    found = [value for name, value in headers if name == b"traceparent"]
    return begin_trace(found[0].decode("latin-1") if len(found) == 1 else None)


def begin_trace(traceparent: str | None) -> str:
    """Continue the caller's trace, or start a new one if the header is missing or malformed."""
    if traceparent:
        context = _PROPAGATOR.extract({"traceparent": traceparent}, Context())
        caller = trace.get_current_span(context).get_span_context()
        if caller.is_valid:
            return _traceparent(caller.trace_id, _new_id(64), caller.trace_flags.sampled)
    return _traceparent(_new_id(128), _new_id(64), True)


def configure_export() -> None:
    """Export spans over OTLP/HTTP; the standard ``OTEL_*`` variables set the endpoint and the service's name."""
    needs("otel", "otel", "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace.export")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # unknown_service where no variable names one
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "psc"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def record_front(began: float) -> None:
    """Record, within the span of a request that began at this ``perf_counter``, the time that a front has taken."""
    now = time.time_ns()
    start = now - int(1e9 * (time.perf_counter() - began))
    trace.get_tracer("psc").start_span("front", start_time=start).end(now)


_FLUSH_MS: Final = 5000  # how long the end of a process waits for the collector


def flush() -> None:
    """Export the spans that wait; a process that ends may run no handler of its exit."""
    if (force_flush := getattr(trace.get_tracer_provider(), "force_flush", None)) is not None:
        force_flush(_FLUSH_MS)


def _traceparent(trace_id: int, span_id: int, is_recorded: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{is_recorded:02d}"


def _new_id(bits: int) -> int:
    return _ids.getrandbits(bits) or 1  # An id of zeros alone is invalid.


_STANDARD_FIELDS: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, trace id within a request, and what ``extra`` holds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace = current_trace.get()
        if trace is not None:
            line["trace_id"] = trace.split("-")[1]
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class TerminalFormatter(logging.Formatter):
    """Formats a record for a person: the message, and what ``extra`` holds; the level if it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.capitalize()}: " if record.levelno >= logging.WARNING else ""
        more = [f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD_FIELDS]
        lines = [level + record.getMessage() + (f" ({', '.join(more)})" if more else "")]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        return "\n".join(map(in_one_line, lines))


def log_config(level: str, *, is_terminal: bool) -> dict[str, Any]:
    """Return a configuration for ``logging.config`` that logs PSC's records at ``level`` or above as JSON lines.

    On a terminal lines are for people, and of the records at the level ``info`` only those that tell of the start.
    Libraries are silent about what happens at ``debug``: they would write what clients sent, such as texts in images.
    """
    start = level == "info" and is_terminal
    own = {"psc.cli": "INFO", "psc.server": "INFO"} if start else {"psc": level.upper()}
    of_libraries = "WARNING" if start else {"debug": "INFO"}.get(level, level.upper())
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": TerminalFormatter if is_terminal else JsonFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "root": {"level": of_libraries, "handlers": ["stderr"]},
        "loggers": {name: {"level": each} for name, each in own.items()},
    }
