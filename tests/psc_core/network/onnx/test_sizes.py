"""Sizes of the tensors of a graph that anybody may have written: known before anything is computed, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from psc_core.errors import NetworkError
from psc_core.network.onnx import restore_body
from psc_core.network.onnx_check import check_model, parse_model, sizes_of
from tools.fuzz.onnx import SIZE, edited


def grown(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([1 << 40, 1, 1, 1]), "huge"))
    model.graph.node.insert(2, helper.make_node("Expand", ["features", "huge"], ["more"]))


def filled(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([1 << 30, 1 << 30]), "huge"))
    model.graph.node.insert(2, helper.make_node("ConstantOfShape", ["huge"], ["more"]))


def counted(model: onnx.ModelProto) -> None:
    for name, number in (("first", 0), ("last", 1 << 40), ("step", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(number), name))
    model.graph.node.insert(2, helper.make_node("Range", ["first", "last", "step"], ["more"]))


def reused(model: onnx.ModelProto) -> None:
    """A range whose length cannot be counted from the distinct inputs alone."""
    for name, number in (("one", 1), ("large", 1 << 40)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(number), name))
    model.graph.node.insert(0, helper.make_node("Div", ["large", "one"], ["limit"]))
    model.graph.node.insert(1, helper.make_node("Range", ["one", "limit", "one"], ["places"]))
    model.graph.node.insert(4, helper.make_node("Gather", ["features", "places"], ["more"], axis=2))


def nothing_to_count(model: onnx.ModelProto) -> None:
    """A range from lists."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2]), "list"))
    model.graph.node.insert(2, helper.make_node("Range", ["list", "list", "list"], ["more"]))


def endless(model: onnx.ModelProto) -> None:
    """More numbers than a number of the machine can count."""
    for name, number in (("first", -(1 << 63)), ("last", (1 << 63) - 1), ("step", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(number), name))
    model.graph.node.insert(2, helper.make_node("Add", ["first", "zero"], ["begin"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    model.graph.node.insert(3, helper.make_node("Range", ["begin", "last", "step"], ["more"]))


def backwards(model: onnx.ModelProto) -> None:
    """Two thousand million numbers, and none where the machine's numbers overflow."""
    for name, number in (("first", (1 << 62) + 9), ("last", -(1 << 62) - 9), ("step", -(1 << 32))):
        model.graph.initializer.append(numpy_helper.from_array(np.array(number), name))
    model.graph.node.insert(2, helper.make_node("Range", ["first", "last", "step"], ["more"]))


def axes(model: onnx.ModelProto) -> None:
    """Each tensor has twice the axes of the one before: 24 in 1,196 bytes took 41 s and 4 GB."""
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1), np.int64), "axes0"))
    model.graph.node.extend(
        helper.make_node("Gather", [f"axes{level}"] * 2, [f"axes{level + 1}"]) for level in range(24)
    )


def long_shape(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(9999, np.int64), "long"))
    model.graph.node.append(helper.make_node("Expand", ["logits", "long"], ["more"]))


def shapeless(model: onnx.ModelProto) -> None:
    del model.graph.input[0].type.tensor_type.shape.dim[:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grown, "'more' has the shape"),
        (filled, "'more' has the shape"),
        (counted, "'more' has the shape"),
        (reused, "'places' has the shape"),
        (nothing_to_count, "sizes cannot be computed|do not fit|ONNX Runtime cannot"),
        (endless, "its bounds are too large"),
        (backwards, "its bounds are too large"),
        (axes, "'axes5' has the shape"),
        (long_shape, "size of 'more' .* is not known"),
        (shapeless, "expected images of a known size"),
    ],
)
def test_refuses_by_name(change: Callable[[onnx.ModelProto], None], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        restore_body(edited(change), SIZE, outputs=2)


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
        for name, numbers in (("row", np.arange(1024)[None]), ("column", np.arange(1024)[:, None])):
            model.graph.initializer.append(numpy_helper.from_array(numbers, name))
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
        for name, number in (("zero", np.array(0)), ("one", np.array(1)), ("last", np.array([2]))):
            model.graph.initializer.append(numpy_helper.from_array(number, name))
        nodes = [
            helper.make_node("Shape", ["features"], ["shape"]),
            helper.make_node("Gather", ["shape", "last"], ["length"]),
            helper.make_node("Squeeze", ["length"], ["count"]),
            helper.make_node("Range", ["zero", "count", "one"], ["places"]),
            helper.make_node("Gather", ["features", "places"], ["gathered"], axis=2),
        ]
        model.graph.node.extend(nodes)

    data = edited(ranged)
    model = parse_model(data, "test")
    check_model(model, "test")
    assert sizes_of(model, "test")["gathered"] == (TensorProto.FLOAT, (2, 4, 36))
