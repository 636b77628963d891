"""The grammar of the trace context header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.observability.tracing import begin_trace, traceparent_of

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
def test_invalid_header_starts_a_new_trace(header: str | None) -> None:
    trace = begin_trace(header)
    assert trace.parent_id is None
    assert trace.trace_id != TRACE


@given(st.text(max_size=80))
def test_traceparent_parses_again(header: str) -> None:
    trace = begin_trace(header)
    again = begin_trace(trace.traceparent)
    assert (again.trace_id, again.parent_id) == (trace.trace_id, trace.span_id)


def test_two_headers_are_as_good_as_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    assert traceparent_of([(b"x", b"y"), header]) == header[1].decode()
    assert traceparent_of([header, header]) is None
    assert traceparent_of([]) is None
