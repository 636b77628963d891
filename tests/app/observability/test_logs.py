"""Lines of the log."""

from __future__ import annotations

import json
import logging

from app.tracing import JsonFormatter, begin_trace, current_trace


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
