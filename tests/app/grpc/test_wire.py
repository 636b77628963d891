"""Fields are counted as the parser finds them, and refused before it has to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("google.protobuf", reason="the gRPC extra is not installed")

from google.protobuf.message import DecodeError

from app.errors import MalformedRequest
from app.grpc import HIGHER, MAX_OCCURRENCES, MAX_UNPACKED, METHODS, check_counts
from tests.app.grpc.occurrences import occurrences

REQUEST = METHODS["ModelInfer"][0]
TENSOR = {"name": "images", "datatype": "UINT8", "shape": [1, 8, 8, 1]}


@pytest.mark.parametrize(
    ("field", "named"),
    [
        (b"\x32\0", "outputs"),
        (b"\x2a\0", "inputs"),
        (b"\x3a\0", "raw_input_contents"),
        (b"\x22\x08\x0a\x02ab\x12\x02\x08\x01", "parameters"),
        (b"\x0a\0", "model_name"),
        (b"\x7a\0", "unknown fields"),
        (b"\x78\x01", "unknown fields"),
        (b"\x79" + bytes(8), "unknown fields"),
        (b"\x7d" + bytes(4), "unknown fields"),
    ],
)
def test_a_field_that_occurs_too_often_is_named(field: bytes, named: str) -> None:
    check_counts(field * MAX_OCCURRENCES, REQUEST)
    with pytest.raises(MalformedRequest, match=f"at most {MAX_OCCURRENCES} {named} in a message"):
        check_counts(field * (MAX_OCCURRENCES + 1), REQUEST)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"shape": [1] * (MAX_OCCURRENCES + 1)}, "shape"),
        ({"parameters": {str(k): {} for k in range(MAX_OCCURRENCES + 1)}}, "parameters"),
        ({"contents": {"fp32_contents": [0.5] * MAX_OCCURRENCES}}, "fp32_contents"),
        (
            {"contents": {"bytes_contents": [b""] * (HIGHER["inference.InferTensorContents.bytes_contents"] + 1)}},
            "bytes_contents",
        ),
    ],
)
def test_fields_of_an_input_are_counted(members: dict[str, Any], named: str) -> None:
    with pytest.raises(MalformedRequest, match=named):
        check_counts(REQUEST(inputs=[TENSOR | members]).SerializeToString(), REQUEST)


def test_those_of_all_inputs_are_counted_together() -> None:
    half = TENSOR | {"shape": [1] * (MAX_OCCURRENCES // 2 + 1)}
    check_counts(REQUEST(inputs=[half]).SerializeToString(), REQUEST)
    with pytest.raises(MalformedRequest, match="shape"):
        check_counts(REQUEST(inputs=[half, half]).SerializeToString(), REQUEST)


def test_pixels_and_files_may_be_many() -> None:
    pixels = TENSOR | {"contents": {"uint_contents": [255] * 100_000}}
    files = TENSOR | {"contents": {"bytes_contents": [b"x"] * 2000}}
    check_counts(REQUEST(inputs=[pixels, files]).SerializeToString(), REQUEST)


def test_packed_pixels_are_counted_by_their_bytes() -> None:
    most = HIGHER["inference.InferTensorContents.uint_contents"]
    check_counts(REQUEST(inputs=[TENSOR | {"contents": {"uint_contents": [1] * most}}]).SerializeToString(), REQUEST)
    body = REQUEST(inputs=[TENSOR | {"contents": {"uint_contents": [255] * most}}]).SerializeToString()
    with pytest.raises(MalformedRequest, match=f"at most {most} bytes of uint_contents in a message"):
        check_counts(body, REQUEST)


def test_pixels_one_by_one_are_few() -> None:
    for count, refused in ((MAX_UNPACKED, False), (MAX_UNPACKED + 1, True)):
        contents = b"\x20\x01" * count
        tensor = b"\x2a" + varint(len(contents)) + contents
        body = b"\x2a" + varint(len(tensor)) + tensor
        assert len(REQUEST.FromString(body).inputs[0].contents.uint_contents) == count
        if refused:
            with pytest.raises(MalformedRequest, match=f"at most {MAX_UNPACKED} uint_contents in a message"):
                check_counts(body, REQUEST)
        else:
            check_counts(body, REQUEST)


def varint(number: int) -> bytes:
    """A length of the wire format."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def test_groups_are_refused() -> None:
    with pytest.raises(MalformedRequest, match="without groups"):
        check_counts(b"\x7b\x7c", REQUEST)


@given(
    st.binary(max_size=40)
    | st.lists(
        st.sampled_from([b"\x32\0", b"\x2a\x06\x1a\x04\1\2\3\4", b"\x2a\x02\x18\x05", b"\x3a\1x", b"\xff", b"\0"])
    ).map(b"".join)
)
def test_no_field_is_missed_that_the_parser_finds(body: bytes) -> None:
    """With the limit one below what the parser finds of the most frequent field, the body is refused."""
    try:
        found = occurrences(REQUEST.FromString(body))
    except DecodeError:
        assume(False)
    assume(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.grpc.MAX_OCCURRENCES", max(found.values()) - 1)
        with pytest.raises(MalformedRequest):
            check_counts(body, REQUEST)
