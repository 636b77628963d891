"""Bodies of the Open Inference Protocol v2: requests to tensors, tensors to responses."""

from __future__ import annotations

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.errors import MalformedRequest
from app.http.v2 import HEADER, OutputTensor, build_response, images_of, parse_request, request_of
from psc_core.errors import PSCError

FILE = {"name": "encoded_images", "shape": [1], "datatype": "BYTES"}


def test_layout_parameter_decides_where_both_fit() -> None:
    cube = np.arange(27, dtype=np.uint8).reshape(1, 3, 3, 3)
    moved = cube.transpose(0, 3, 1, 2)
    for layout, nchw in (("NCHW", cube), ("NHWC", moved), (None, moved)):
        parameters = {} if layout is None else {"layout": layout}
        entry = {"name": "images", "shape": [1, 3, 3, 3], "datatype": "UINT8", "parameters": parameters}
        request, binary = parse_request(json.dumps({"inputs": [{**entry, "data": cube.tolist()}]}).encode(), None)
        np.testing.assert_array_equal(images_of(request.inputs[0], binary, (3, 3, 3), max_images=1), nchw)


@given(st.data(), st.permutations([2, 1, 3, 4]), st.integers(0, 3))
def test_nested_data_have_the_shape_that_the_request_says(data: st.DataObject, sizes: list[int], first: int) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 1, 3, 4)
    axes = data.draw(st.sampled_from([tuple(sizes), (*sizes[:first], -1), (24,), (2, 12), (24, 1), (1, 24)]))
    nested = pixels.reshape(axes)
    entry = {"name": "images", "shape": [2, 1, 3, 4], "datatype": "UINT8", "data": nested.tolist()}
    tensor = request_of({"inputs": [entry]}).inputs[0]
    if nested.ndim == 1 or nested.shape == pixels.shape:
        np.testing.assert_array_equal(images_of(tensor, None, (1, 3, 4), max_images=2), pixels)
    else:
        with pytest.raises(MalformedRequest, match="shape"):
            images_of(tensor, None, (1, 3, 4), max_images=2)


@pytest.mark.parametrize(
    ("shape", "values", "is_right"),
    [
        ([2], ["QQ==", "Qg=="], True),
        ([2, 1], ["QQ==", "Qg=="], True),
        ([2, 1], [["QQ=="], ["Qg=="]], True),
        ([2], [["QQ=="], ["Qg=="]], False),
        ([2, 1], [["QQ=="], "Qg=="], False),
        ([2, 1], [["QQ==", "Qg=="]], False),
        ([2, 1], [["QQ=="], []], False),
        ([2, 1], [[["QQ=="]], [["Qg=="]]], False),
    ],
)
def test_files_in_json_have_the_shape_that_the_request_says(
    shape: list[int], values: list[object], is_right: bool
) -> None:
    tensor = request_of({"inputs": [FILE | {"shape": shape, "data": values}]}).inputs[0]
    if is_right:
        assert images_of(tensor, None, (1, 8, 8), max_images=2) == [b"A", b"B"]
    else:
        with pytest.raises(MalformedRequest, match="encoded_images"):
            images_of(tensor, None, (1, 8, 8), max_images=2)


@pytest.mark.parametrize("value", [1.0, True, "1", None, -1, 256, {}, [1]])
def test_a_pixel_is_a_whole_number_of_a_byte(value: object) -> None:
    entry = {"name": "images", "shape": [1, 1, 1, 2], "datatype": "UINT8", "data": [7, value]}
    with pytest.raises(MalformedRequest, match="images"):
        images_of(request_of({"inputs": [entry]}).inputs[0], None, (1, 1, 2), max_images=1)


@pytest.mark.parametrize("shape", [[1.0], [-1], ["1"], [True], [None], [], [2**70], [1, 2], [1, 1, 1]])
def test_a_shape_that_is_none_is_refused(shape: list[object]) -> None:
    with pytest.raises(PSCError):
        images_of(
            request_of({"inputs": [FILE | {"shape": shape, "data": ["QQ=="]}]}).inputs[0], None, (1, 8, 8), max_images=2
        )


@pytest.mark.parametrize("length", ["9" * 5000, "²", "٣"])
def test_rejects_header_lengths_that_are_no_number(length: str) -> None:
    with pytest.raises(MalformedRequest, match=HEADER):
        parse_request(b'{"inputs": []}', length)


@pytest.mark.parametrize("part", ["shape", "outputs", "inputs"])
def test_a_list_is_refused_at_its_first_fault(part: str) -> None:
    many: list[object] = [""] * 100_000
    document = {"inputs": many if part == "inputs" else [FILE | ({"shape": many} if part == "shape" else {})]}
    document |= {"outputs": many} if part == "outputs" else {}
    with pytest.raises(MalformedRequest) as caught:
        request_of(document)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() <= 2


@given(body=st.binary(max_size=60) | st.text(alphabet='{}[]",:inputs0123', max_size=60).map(str.encode))
def test_any_body_parses_or_raises_our_errors(body: bytes) -> None:
    for header in (None, "5", str(len(body))):
        with contextlib.suppress(PSCError):
            request, binary = parse_request(body, header)
            images_of(request.inputs[0], binary, (1, 8, 8), max_images=2)


@given(
    files=st.lists(st.binary(max_size=20), min_size=1, max_size=5),
    cut=st.integers(0, 30),
    extra=st.binary(max_size=6),
)
def test_binary_elements_come_back_or_are_rejected(files: list[bytes], cut: int, extra: bytes) -> None:
    data = b"".join(struct.pack("<I", len(file)) + file for file in files)
    damaged = data[: max(0, len(data) - cut)] + extra
    for content, whole in ((data, True), (damaged, damaged == data)):
        entry = {**FILE, "shape": [len(files)], "parameters": {"binary_data_size": len(content)}}
        head = json.dumps({"inputs": [entry]}).encode()
        request, binary = parse_request(head + content, str(len(head)))
        try:
            read = images_of(request.inputs[0], binary, (1, 8, 8), max_images=5)
        except PSCError:
            assert not whole
        else:
            assert isinstance(read, list)
            assert len(read) == len(files)
            assert not whole or read == files


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=8), max_size=4), st.booleans())
def test_texts_come_back_from_a_response(texts: list[str], binary: bool) -> None:
    tritonclient = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    tensor = OutputTensor("label", "BYTES", (len(texts),), texts)
    body, length = build_response({"model_name": "m"}, [tensor], {"label": binary})
    result = tritonclient.InferResult.from_response_body(body, header_length=length)
    values = result.as_numpy("label").tolist()
    assert [value.decode() if isinstance(value, bytes) else value for value in values] == texts
