"""W3C trace context: the ids that tie log lines and answers to a caller's trace.

``traceparent`` (https://www.w3.org/TR/trace-context/) is ``version-traceid-parentid-flags`` in lower-case
hex, 2-32-16-2 digits.  A valid one is continued (same trace id, new span id); a missing or malformed one
starts a new trace, as the specification asks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple

_PATTERN: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED: Final = 0x01
"""The flag of a trace that is recorded."""

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
            sampled = bool(int(flags, 16) & SAMPLED)
            return TraceContext(trace_id, _new_id(64), parent_id, sampled)
    return TraceContext(_new_id(128), _new_id(64))


def traceparent_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The ``traceparent`` header; None if there are several."""
    found = [value for name, value in headers if name == b"traceparent"]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _new_id(bits: int) -> str:
    """Random hex id that is not all zeros."""
    return f"{_ids.getrandbits(bits) or 1:0{bits // 4}x}"
