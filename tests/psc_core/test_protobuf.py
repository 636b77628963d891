"""Fields are found where the library's parser finds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("google.protobuf", reason="neither the gRPC nor the ONNX extra is installed")

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from psc_core.network.onnx_check import FIXED32, FIXED64, GROUPS, LENGTH, VARINT, fields


def varint(number: int) -> bytes:
    groups = [number >> 7 * place & 127 for place in range(max(1, -(-number.bit_length() // 7)))]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


numbers = st.integers(0, 2**64 - 1)
contents = st.one_of(
    numbers.map(lambda number: (VARINT, varint(number))),
    st.binary(min_size=8, max_size=8).map(lambda eight: (FIXED64, eight)),
    st.binary(max_size=300).map(lambda text: (LENGTH, varint(len(text)) + text)),
    st.binary(min_size=4, max_size=4).map(lambda four: (FIXED32, four)),
)


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), contents), max_size=20))
def test_finds_every_field(members: list[tuple[int, tuple[int, bytes]]]) -> None:
    body = b"".join(varint(number << 3 | kind) + content for number, (kind, content) in members)
    parsed = [(each.field_number, each.wire_type) for each in UnknownFieldSet(Empty.FromString(body))]
    assert [(number, kind) for number, kind, _ in fields(memoryview(body))] == parsed
    texts = [each.data for each in UnknownFieldSet(Empty.FromString(body)) if each.wire_type == LENGTH]
    assert [bytes(content) for _, kind, content in fields(memoryview(body)) if kind == LENGTH] == texts


@given(st.binary(max_size=40))
def test_finds_no_fewer_than_the_parser(body: bytes) -> None:
    found = list(fields(memoryview(body)))
    try:
        parsed = UnknownFieldSet(Empty.FromString(body))
    except DecodeError:
        return
    assert len(found) >= len(parsed)


def test_a_group_is_its_begin_its_fields_and_its_end() -> None:
    assert [kind for _, kind, _ in fields(memoryview(b"\x0b\x10\x01\x0c"))] == [GROUPS[0], VARINT, GROUPS[1]]
