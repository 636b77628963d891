from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network import onnx_check
from psc_core.network.onnx import cost_of, keep_from_compiler, restore_body
from psc_core.network.onnx_check import (
    FIXED32,
    FIXED64,
    GROUPS,
    LENGTH,
    VARINT,
    check_model,
    fields,
    parse_model,
    sizes_of,
)
from tools.fuzz.onnx import SIZE, edited, graph

good = cache(graph)


def test_a_good_file_runs() -> None:
    features, logits = restore_body(good(), SIZE, outputs=2)(torch.ones(3, *SIZE))
    assert features.shape == (3, 4, 36) and bool((features == 9).all())
    assert logits.shape == (3, 3) and bool((logits == 36).all())


class Doubled(nn.Module):
    """What PyTorch computes from the logits of a graph."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)[1]
        return 2 * logits


def test_a_compiled_network_calls_the_graph_as_it_is() -> None:
    network = Doubled(restore_body(good(), SIZE, outputs=2))
    keep_from_compiler(network)
    images = torch.ones(3, *SIZE)
    assert torch.compile(network, backend="eager", dynamic=False)(images).equal(network(images))


def external(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def subgraph(model: onnx.ModelProto) -> None:
    inner = helper.make_graph([], "inner", [], [])
    model.graph.node.append(helper.make_node("If", ["logits"], ["more"], then_branch=inner, else_branch=inner))


def added(operator: str, domain: str = "") -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.append(helper.make_node(operator, ["logits"], ["more"], domain=domain))


def hold(model: onnx.ModelProto, **constants: Any) -> None:
    """Add constants by their names."""
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())


def computed(operator: str, at: int, **constants: Any) -> Callable[[onnx.ModelProto], None]:
    """An operation whose inputs are constants, and others by their names."""

    def change(model: onnx.ModelProto) -> None:
        hold(model, **{name: value for name, value in constants.items() if value is not None})
        model.graph.node.insert(at, helper.make_node(operator, [*constants], ["more"]))

    return change


def function(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("", "Mine", ["a"], ["b"], body, [helper.make_opsetid("", 18)]))


def sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [1 << 40]))


def sparse_attribute(model: onnx.ModelProto) -> None:
    """Whose values ONNX Runtime would read from another file."""
    values = TensorProto(name="values", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    values.external_data.add(key="location", value="secret.bin")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    constant = helper.make_node("Constant", [], ["more"])
    constant.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR).sparse_tensor.CopyFrom(
        onnx.SparseTensorProto(values=values, indices=places, dims=[1 << 40])
    )
    model.graph.node.append(constant)


def dropout(model: onnx.ModelProto) -> None:
    hold(model, ratio=np.float32(0.5), training=True)
    model.graph.node.append(helper.make_node("Dropout", ["logits", "ratio", "training"], ["more"]))


@pytest.mark.parametrize("data", [b"", b"\x00" * 99, b"not ONNX", good()[:50], good()[: len(good()) // 2]])
def test_refuses_what_is_no_model(data: bytes) -> None:
    with pytest.raises(NetworkError):
        restore_body(data, SIZE, outputs=2)


def test_a_domain_that_is_no_text_is_refused() -> None:
    data = edited(added("Relu", "strange")).replace(b"strange", b"\xff" * 7)
    with pytest.raises(NetworkError, match="uses operators of"):
        restore_body(data, SIZE, outputs=2)


def nested(content: bytes, tag: bytes) -> bytes:
    """A message's content as the only field of another."""
    length, size = bytearray(), len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return tag + bytes((*length, size)) + content


@pytest.mark.parametrize("tag", [b"\x0a", b"\x2a", b"\x6a", b"\x7a"], ids=["nodes", "constants", "values", "unknown"])
def test_fields_are_counted_before_they_exist(tag: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes two bytes in the file, and more than a hundred once it is parsed."""
    monkeypatch.setattr(onnx_check, "MAX_FIELDS", 1000)
    parse_model(good(), "test")
    monkeypatch.setattr(onnx.ModelProto, "ParseFromString", lambda *_: pytest.fail("was parsed"))
    with pytest.raises(NetworkError, match="at most 1000 fields"):
        parse_model(nested((tag + b"\0") * 1000, b"\x3a"), "test")
    deep = b""
    for _ in range(onnx_check.MAX_DEPTH):
        deep = nested(nested(nested(deep, b"\x32"), b"\x2a"), b"\x0a")  # An attribute of a node of a graph.
    with pytest.raises(NetworkError, match="at most 32 messages inside each other"):
        parse_model(nested(deep, b"\x3a"), "test")


@given(
    places=st.lists(st.tuples(st.integers(0, len(good()) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 8),
)
def test_a_damaged_file_is_refused_or_runs(places: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(good())
    for place, byte in places:
        data[place] = byte
    del data[places[0][0] : places[0][0] + cut]
    try:
        outputs = restore_body(bytes(data), SIZE, outputs=2)(torch.ones(2, *SIZE))
    except NetworkError:
        return
    assert [len(output) for output in outputs] == [2, 2]


def test_a_cost_is_what_is_alive_at_once() -> None:
    body = restore_body(good(), SIZE, outputs=2)
    assert body.cost is not None
    map_, pooled, logits, features = 4 * 4 * 36, 4 * 4, 4 * 3, 4 * 4 * 36
    assert body.cost.alive == max(4 * 64 + map_, map_ + features, features + pooled + logits)
    assert body.cost.operations == 2 * 4 * 36 * 9 + 2 * 4 * 36 + 2 * 3 * 4


@pytest.mark.parametrize(
    ("op", "weight", "sides", "expected"),
    [
        ("ConvTranspose", (1, 5, 9, 9), (28, 28), 4 * 5 * 81 * 28 * 28),
        ("ConvTranspose", (1, 5, 9), (28,), 4 * 5 * 9 * 28),
        ("Conv", (5, 1, 9, 9), (28, 28), 0),
        ("Conv", (65, 1, 9, 9), (8, 8), 4 * 81 * 64),
        ("Conv", (5, 1, 3, 3, 3, 3), (6, 6, 6, 6), 4 * 81 * 6**4),
        ("ConvInteger", (5, 1, 9, 9), (28, 28), 81 * 28 * 28),
        ("QLinearConv", (5, 1, 9, 9), (28, 28), 8 * 81 * 28 * 28),
        ("Relu", (), (28, 28), 0),
    ],
)
def test_a_cost_has_the_columns_of_convolutions(
    op: str, weight: tuple[int, ...], sides: tuple[int, ...], expected: int
) -> None:
    """What ONNX Runtime 1.32 takes beside tensors, once for a batch, whatever its size."""
    pads = [side // 2 for side in weight[2:]] * 2
    inputs = {"QLinearConv": ["x", "s", "z", "w", "s", "z", "s", "z"], "Relu": ["x"]}.get(op, ["x", "w"])
    attributes = {} if op == "Relu" else {"pads": pads}
    kind, nbytes = (TensorProto.UINT8, 1) if op in ("ConvInteger", "QLinearConv") else (TensorProto.FLOAT, 4)
    shape = (2, 1, *sides)
    graph = helper.make_graph(
        [helper.make_node(op, inputs, ["y"], **attributes)],
        "graph",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            helper.make_tensor("w", kind, weight, bytes(nbytes * math.prod(weight)), True),
            helper.make_tensor("s", TensorProto.FLOAT, [], [1.0]),
            helper.make_tensor("z", TensorProto.UINT8, [], [0]),
        ],
    )
    model = helper.make_model(graph)
    sizes = {"x": (kind, shape), "y": (TensorProto.FLOAT, (2, 1 if op == "Relu" else weight[0], *sides))}
    assert cost_of(model, sizes, 2).scratch == cost_of(model, sizes, 1).scratch == expected


def test_any_type_of_images_and_none_at_all() -> None:
    body = restore_body(good(), SIZE, outputs=2)
    for dtype in (torch.float64, torch.float16, torch.uint8):
        assert torch.equal(body(torch.ones(2, *SIZE, dtype=dtype))[1], body(torch.ones(2, *SIZE))[1])
    assert [tuple(output.shape) for output in body(torch.ones(0, *SIZE))] == [(0, 4, 36), (0, 3)]


def reused(model: onnx.ModelProto) -> None:
    """A range whose length cannot be counted from the distinct inputs alone."""
    hold(model, one=1, large=1 << 40)
    model.graph.node.insert(0, helper.make_node("Div", ["large", "one"], ["limit"]))
    model.graph.node.insert(1, helper.make_node("Range", ["one", "limit", "one"], ["places"]))
    model.graph.node.insert(4, helper.make_node("Gather", ["features", "places"], ["more"], axis=2))


def nothing_to_count(model: onnx.ModelProto) -> None:
    """A range from lists."""
    hold(model, list=[1, 2])
    model.graph.node.insert(2, helper.make_node("Range", ["list", "list", "list"], ["more"]))


def endless(model: onnx.ModelProto) -> None:
    """More numbers than a number of the machine can count."""
    hold(model, first=-(1 << 63), last=(1 << 63) - 1, step=1, zero=0)
    model.graph.node.insert(2, helper.make_node("Add", ["first", "zero"], ["begin"]))
    model.graph.node.insert(3, helper.make_node("Range", ["begin", "last", "step"], ["more"]))


def axes(model: onnx.ModelProto) -> None:
    """Each tensor has twice the axes of the one before: 24 in 1,196 bytes took 41 s and 4 GB."""
    hold(model, axes0=np.zeros((1, 1), np.int64))
    model.graph.node.extend(
        helper.make_node("Gather", [f"axes{level}"] * 2, [f"axes{level + 1}"]) for level in range(24)
    )


def test_each_operation_on_sizes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that gives many numbers: two hundred outer sums in 26 KB took 13 s."""
    computed: list[str] = []

    class Evaluator(ReferenceEvaluator):  # type: ignore[misc]
        def run(self, *arguments: Any) -> Any:
            computed.append(self.proto_.op_type)
            return super().run(*arguments)

    def sums(model: onnx.ModelProto) -> None:
        name = "features"
        for level in range(99):
            model.graph.node.append(helper.make_node("Shape", [name], [f"shape{level}"]))
            model.graph.node.append(helper.make_node("Reshape", [name, f"shape{level}"], [name := f"reshaped{level}"]))
        hold(model, row=np.arange(1024)[None], column=np.arange(1024)[:, None])
        for index in range(5):
            model.graph.node.append(helper.make_node("Add", ["row", "column"], [f"sum{index}"]))
            model.graph.node.append(helper.make_node("Cast", ["sides"], [f"real{index}"], to=TensorProto.FLOAT))
            model.graph.node.append(helper.make_node("Cast", ["sides"], [f"short{index}"], to=TensorProto.INT32))

    monkeypatch.setattr("onnx.reference.ReferenceEvaluator", Evaluator)
    restore_body(edited(sums), SIZE, outputs=2)
    assert computed == ["Cast"] * 5


def test_sizes_made_of_computed_integers_are_known() -> None:
    """As PyTorch writes the mean over two axes of a map of any size."""

    def ranged(model: onnx.ModelProto) -> None:
        hold(model, zero=0, one=1, last=[2])
        model.graph.node.extend([
            helper.make_node("Shape", ["features"], ["shape"]),
            helper.make_node("Gather", ["shape", "last"], ["length"]),
            helper.make_node("Squeeze", ["length"], ["count"]),
            helper.make_node("Range", ["zero", "count", "one"], ["places"]),
            helper.make_node("Gather", ["features", "places"], ["gathered"], axis=2),
        ])  # fmt: skip

    data = edited(ranged)
    model = parse_model(data, "test")
    check_model(model, "test")
    assert sizes_of(model, "test")["gathered"] == (TensorProto.FLOAT, (2, 4, 36))


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


TEXT = helper.make_tensor("text", TensorProto.STRING, [1], [b"a"])
MISFIT = numpy_helper.from_array(np.ones((4, 2, 3, 3), np.float32), "weights")


def shape_of(model: onnx.ModelProto) -> onnx.TensorShapeProto:
    return model.graph.input[0].type.tensor_type.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (external, "'weights' lies in another file"),
        (lambda model: model.graph.initializer[0].dims.__setitem__(0, 1 << 40), "'weights' claims the shape"),
        (subgraph, "the operator If holds a graph"),
        *(
            (added(name), f"the operator '{name}' is not supported")
            for name in ("Unheard", "NonZero", "RandomNormalLike")
        ),
        (added("Gelu", "com.microsoft"), "com.microsoft"),
        (function, "operators of Mine"),
        (sparse, "sparse constants"),
        (sparse_attribute, "sparse constants"),
        (dropout, "a dropout that may be active"),
        (computed("Add", 4, logits=None, wide=np.zeros((1,) * 60, np.float32)), "'wide' has 60 axes"),
        (lambda model: setattr(model.opset_import[0], "version", 6), "version 7 of ONNX's operators"),
        (lambda model: model.graph.initializer.append(TEXT), "'text' is not an array of numbers"),
        (lambda model: model.graph.initializer[0].CopyFrom(MISFIT), "ONNX Runtime cannot"),
        (lambda model: model.graph.node[0].input.__setitem__(0, "features"), "not a valid ONNX model"),
        (lambda model: setattr(model.graph.input[0], "name", "other"), r"one input named images|not a valid"),
        (lambda model: setattr(shape_of(model).dim[2], "dim_value", 9), r"the shape \(1, 8, 8\)|do not fit"),
        (lambda model: model.graph.output.pop(), "expected 2 outputs"),
        (
            lambda model: setattr(model.graph.output[1].type.tensor_type, "elem_type", TensorProto.DOUBLE),
            r"outputs|cannot",
        ),
        (computed("Expand", 2, features=None, huge=[1 << 40, 1, 1, 1]), "'more' has the shape"),
        (computed("ConstantOfShape", 2, huge=[1 << 30, 1 << 30]), "'more' has the shape"),
        (computed("Range", 2, first=0, last=1 << 40, step=1), "'more' has the shape"),
        (reused, "'places' has the shape"),
        (nothing_to_count, r"sizes cannot be computed|do not fit|ONNX Runtime cannot"),
        (endless, "its bounds are too large"),
        # Two thousand million numbers, and none where the machine's numbers overflow.
        (computed("Range", 2, first=(1 << 62) + 9, last=-(1 << 62) - 9, step=-(1 << 32)), "its bounds are too large"),
        (axes, "'axes5' has the shape"),
        (computed("Expand", 4, logits=None, long=np.ones(9999, np.int64)), "size of 'more' .* is not known"),
        (lambda model: shape_of(model).ClearField("dim"), "expected images of a known size"),
    ],
)
def test_refuses_by_name(change: Callable[[onnx.ModelProto], None], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        restore_body(edited(change), SIZE, outputs=2)(torch.ones(2, *SIZE))
