"""Count how often each field occurs in a serialized message, before any of it becomes an object.

A message costs by its fields, not by its bytes: two bytes are an empty output, and ten million of them take 20 GB as
objects, with the interpreter's lock held.  So the wire format is walked first, by the messages' descriptors, and the
walk ends at the first field that occurs too often.  What is cut off or out of shape is left to the parser, which
refuses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from app.errors import MalformedRequest
from app.http.json_body import MAXIMUM_VALUES

MAXIMUM_OCCURRENCES: Final = 256
"""Maximum occurrences of a field in a message, the messages inside it included."""

HIGHER: Final[Mapping[str, int]] = {
    "inference.InferTensorContents.uint_contents": MAXIMUM_VALUES,
    "inference.InferTensorContents.bytes_contents": 1 << 14,
}
"""Fields that may occur more often: the files of images, and the pixels, bytes of which are counted."""

MAXIMUM_UNPACKED: Final = 1 << 14
"""Maximum occurrences of a field one by one, each a step of the walk; writers pack numbers by themselves."""

_VARINT, _FIXED64, _LENGTH, _GROUPS, _FIXED32 = 0, 1, 2, (3, 4), 5
_NEVER_PACKED: Final = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_counts(body: bytes, message_type: Any) -> None:
    """Refuse a message in which a field occurs too often.

    Args:
        body: The serialized message.
        message_type: Its class.

    Raises:
        MalformedRequest: A field occurs too often, or there are groups, which proto3 does not have.
    """
    _count(memoryview(body), message_type.DESCRIPTOR, Counter())


def _count(body: memoryview, message: Any, seen: Counter[str]) -> None:
    for number, wire_type, content in _fields(body):
        field = message.fields_by_number.get(number)
        name = "unknown fields" if field is None else field.full_name
        # Packed numbers have at least a byte each; counting them more closely would cost a pass.
        is_packed = field is not None and wire_type == _LENGTH and field.type not in _NEVER_PACKED
        seen[name] += len(content) if is_packed else 1
        limit = HIGHER.get(name, MAXIMUM_OCCURRENCES)
        if seen[name] > (limit := limit if is_packed else min(limit, MAXIMUM_UNPACKED)):
            raise MalformedRequest(
                f"expected at most {limit} {'bytes of ' * is_packed}{name.rpartition('.')[2]} in a message, got more; "
                "send fewer, and pixels as raw_input_contents"
            )
        if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE and wire_type == _LENGTH:
            _count(content, field.message_type, seen)


def _fields(body: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Number, wire type and content of each field, in order, up to what no parser takes."""
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        start, wire_type = at, tag & 7
        if wire_type == _VARINT:
            _, at = _varint(body, at)
        elif wire_type == _FIXED64:
            at += 8
        elif wire_type == _FIXED32:
            at += 4
        elif wire_type == _LENGTH:
            size, start = _varint(body, at)
            at = start + size
        elif wire_type in _GROUPS:
            raise MalformedRequest("expected a message without groups, which proto3 does not have; leave them out")
        else:
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
