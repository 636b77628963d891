"""Count how often each field occurs in a serialized message, before it is parsed to objects.

The cost of a message lies in its fields, not its bytes: an empty output is two bytes, and ten million of them take
20 GB as objects, parsed with the interpreter's lock held.  So the wire format is walked first, by the messages'
descriptors, and the walk ends at the first field that occurs too often.  Truncated or malformed messages are left to
the parser, which refuses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from app.errors import MalformedRequest
from app.http.body import MAX_VALUES
from psc_core.network.onnx_check import GROUPS, LENGTH, fields

# The maximum number of times that a field occurs in a message, including the messages inside it.
MAX_OCCURRENCES: Final = 256

# The limits of fields that may occur more often: image files, and pixels, which are counted in bytes.
HIGHER: Final[Mapping[str, int]] = {
    "inference.InferTensorContents.uint_contents": MAX_VALUES,
    "inference.InferTensorContents.bytes_contents": 1 << 14,
}

# The maximum number of unpacked occurrences of a field, each of which is a step of the walk; writers pack numbers.
MAX_UNPACKED: Final = 1 << 14

_NEVER_PACKED: Final = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_counts(body: bytes, message_type: Any) -> None:
    """Refuse a message in which a field occurs too often."""
    _count(memoryview(body), message_type.DESCRIPTOR, Counter())


def _count(body: memoryview, message: Any, seen: Counter[str]) -> None:
    for number, wire_type, content in fields(body):
        if wire_type in GROUPS:
            raise MalformedRequest("expected a message without groups, which proto3 does not have; leave them out")
        field = message.fields_by_number.get(number)
        name = "unknown fields" if field is None else field.full_name
        # A packed number has at least one byte; an exact count would cost another pass.
        is_packed = field is not None and wire_type == LENGTH and field.type not in _NEVER_PACKED
        seen[name] += len(content) if is_packed else 1
        limit = HIGHER.get(name, MAX_OCCURRENCES)
        if seen[name] > (limit := limit if is_packed else min(limit, MAX_UNPACKED)):
            raise MalformedRequest(
                f"expected at most {limit} {'bytes of ' * is_packed}{name.rpartition('.')[2]} in a message, got more; "
                "send fewer, and pixels as raw_input_contents"
            )
        if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE and wire_type == LENGTH:
            _count(content, field.message_type, seen)
