"""Walk the fields of a serialized Protocol Buffers message without parsing it.

The cost of parsing depends on the number of fields, not on the number of bytes: two bytes can encode an empty message
that takes a hundred bytes as an object.  So the fields of an untrusted message are counted before it is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
GROUPS: Final = (3, 4)
"""The wire types that begin and end a group."""


def fields(body: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield the number, wire type and content of each field in order, and stop where the message is malformed.

    A group has no content of its own; its fields follow as if they belonged to the message itself.
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
    """Return a number of at most ten bytes, and the position after it."""
    value = 0
    for place, byte in enumerate(body[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    return value, len(body)
