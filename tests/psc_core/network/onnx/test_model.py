"""ONNX files that anybody may have written: refused by name, or harmless."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network import onnx_check
from psc_core.network.onnx import MAX_SESSIONS, keep_from_compiler, restore_body
from psc_core.network.onnx_check import parse_model
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


def gigabytes(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 1 << 40


def subgraph(model: onnx.ModelProto) -> None:
    inner = helper.make_graph([], "inner", [], [])
    model.graph.node.append(helper.make_node("If", ["logits"], ["more"], then_branch=inner, else_branch=inner))


def added(operator: str, domain: str = "") -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.append(helper.make_node(operator, ["logits"], ["more"], domain=domain))


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
    for name, value in (("ratio", np.array(0.5, np.float32)), ("training", np.array(True))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    model.graph.node.append(helper.make_node("Dropout", ["logits", "ratio", "training"], ["more"]))


def many_axes(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1,) * 60, np.float32), "wide"))
    model.graph.node.append(helper.make_node("Add", ["logits", "wide"], ["more"]))


def old(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 6


def text(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("text", TensorProto.STRING, [1], [b"a"]))


def misfit(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((4, 2, 3, 3), np.float32), "weights"))


def circular(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "features"


def renamed(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "other"


def resized(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 9


def lost(model: onnx.ModelProto) -> None:
    del model.graph.output[1]


def as_float64(model: onnx.ModelProto) -> None:
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (external, "'weights' lies in another file"),
        (gigabytes, "'weights' claims the shape"),
        (subgraph, "the operator If holds a graph"),
        (added("Unheard"), "the operator 'Unheard' is not supported"),
        (added("NonZero"), "the operator 'NonZero' is not supported"),
        (added("RandomNormalLike"), "the operator 'RandomNormalLike' is not supported"),
        (added("Gelu", "com.microsoft"), "uses operators of com.microsoft"),
        (function, "uses operators of Mine"),
        (sparse, "sparse constants"),
        (sparse_attribute, "sparse constants"),
        (dropout, "a dropout that may be active"),
        (many_axes, "'wide' has 60 axes"),
        (old, "expected version 7 of ONNX's operators"),
        (text, "'text' is not an array of numbers"),
        (misfit, "ONNX Runtime cannot"),
        (circular, "not a valid ONNX model"),
        (renamed, "expected one input named images|not a valid"),
        (resized, r"expected images of the shape \(1, 8, 8\)|do not fit"),
        (lost, "expected 2 outputs"),
        (as_float64, "outputs|do not fit|ONNX Runtime cannot"),
    ],
)
def test_refuses_by_name(change: Callable[[onnx.ModelProto], None], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        restore_body(edited(change), SIZE, outputs=2)(torch.ones(2, *SIZE))


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
    with pytest.raises(NetworkError, match="expected at most 1000 fields, got more"):
        parse_model(nested((tag + b"\0") * 1000, b"\x3a"), "test")


def test_messages_inside_each_other_are_counted() -> None:
    graph = b""
    for _ in range(onnx_check.MAX_DEPTH):
        graph = nested(nested(nested(graph, b"\x32"), b"\x2a"), b"\x0a")  # An attribute of a node of a graph.
    with pytest.raises(NetworkError, match="expected at most 32 messages inside each other"):
        parse_model(nested(graph, b"\x3a"), "test")


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


def test_any_type_of_images_and_none_at_all() -> None:
    body = restore_body(good(), SIZE, outputs=2)
    for dtype in (torch.float64, torch.float16, torch.uint8):
        assert torch.equal(body(torch.ones(2, *SIZE, dtype=dtype))[1], body(torch.ones(2, *SIZE))[1])
    assert [tuple(output.shape) for output in body(torch.ones(0, *SIZE))] == [(0, 4, 36), (0, 3)]


def test_few_sessions_are_kept_and_none_is_copied() -> None:
    body, before = restore_body(good(), SIZE, outputs=2), torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        body(torch.ones(1, *SIZE))
    torch.set_num_threads(before)
    assert len(body._sessions) == MAX_SESSIONS
    twin = copy.deepcopy(body)
    assert not twin._sessions and torch.equal(twin(torch.ones(1, *SIZE))[1], body(torch.ones(1, *SIZE))[1])
