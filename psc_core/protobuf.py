"""Walk a serialized message of Protocol Buffers without parsing it.

A message costs by its fields, not by its bytes: two bytes are an empty message, and take a hundred as an object.  So
who parses what a stranger wrote counts its fields first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
GROUPS: Final = (3, 4)
"""Types of the wire format."""


def fields(body: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield number, wire type and content of each field, in order, up to what no parser takes.

    A group's begin and end have no content; its fields follow one by one as if they were the message's own.
    """
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        start, wire_type = at, tag & 7
        if wire_type == VARINT:
            _, at = _varint(body, at)
        elif wire_type == FIXED64:
            at += 8
        elif wire_type == FIXED32:
            at += 4
        elif wire_type == LENGTH:
            size, start = _varint(body, at)
            at = start + size
        elif wire_type not in GROUPS:
            return
        yield tag >> 3, wire_type, body[start:at]


def _varint(body: memoryview, at: int) -> tuple[int, int]:
    """A number of at most ten bytes, and where it ends."""
    value = 0
    for place, byte in enumerate(body[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    return value, len(body)
