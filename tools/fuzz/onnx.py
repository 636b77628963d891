"""A graph is refused, as a user's network and in a bundle, or has the sizes that were found out before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from psc_core.errors import NetworkError
from psc_core.network.onnx import OnnxNetwork, restore_body
from psc_core.network.onnx_check import check_model, parse_model, sizes_of
from psc_core.network.onnx_graph import with_one_input

SIZE: Final = (1, 8, 8)
OUTPUTS: Final = 2
MAX_TEXT: Final = 2000

MODEST_BYTES: Final = 1 << 24
MODEST_OPERATIONS: Final = 1 << 24  # A graph that takes more for an image is checked only


def graph(*middle: onnx.NodeProto, **constants: object) -> bytes:
    """Features of one layer and logits, with other operations between."""
    values = {
        "weights": np.ones((4, 1, 3, 3), np.float32),
        "head": np.ones((3, 4), np.float32),
        "sides": np.array([0, 0, -1]),
        "axis": np.array([2]),
        **constants,
    }
    nodes = [
        helper.make_node("Conv", ["images", "weights"], ["map"], kernel_shape=[3, 3]),
        helper.make_node("Reshape", ["map", "sides"], ["features"]),
        *middle,
        helper.make_node("ReduceMean", ["features", "axis"], ["pooled"], keepdims=0),
        helper.make_node("Gemm", ["pooled", "head"], ["logits"], transB=1),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [value("images", TensorProto.FLOAT, ["batch", *SIZE])],
        [value("features", TensorProto.FLOAT, ["batch", 4, 36]), value("logits", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(model.SerializeToString())


def edited(change: Callable[[onnx.ModelProto], None]) -> bytes:
    """The same graph after a change."""
    model = onnx.load_model_from_string(graph())
    change(model)
    return bytes(model.SerializeToString())


SEEDS: Final = [
    graph(),
    graph(
        helper.make_node("Shape", ["features"], ["shape"]),
        helper.make_node("Gather", ["shape", "axis"], ["length"]),
        helper.make_node("Squeeze", ["length"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["places"]),
        helper.make_node("Gather", ["features", "places"], ["gathered"], axis=2),
        zero=np.array(0),
        one=np.array(1),
    ),
    graph(
        helper.make_node("Relu", ["map"], ["active"]),
        helper.make_node("MaxPool", ["active"], ["largest"], kernel_shape=[2, 2], pads=[1, 0, 0, 1], strides=[2, 1]),
        helper.make_node("Resize", ["largest", "", "scales"], ["resized"], mode="linear"),
        helper.make_node("Softmax", ["resized"], ["weighed"], axis=1),
        helper.make_node("Split", ["weighed"], ["left", "right"], axis=1, num_outputs=2),
        helper.make_node("Concat", ["right", "left"], ["swapped"], axis=1),
        helper.make_node("Pad", ["swapped", "pads"], ["padded"]),
        scales=np.array([1, 1, 2, 2], np.float32),
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    ),
]


def check(data: bytes) -> None:
    """List its layers as a network's; restore it as a bundle's, and compute two images where that is cheap."""
    try:
        model = parse_model(data, "net")
        check_model(model, "net")
        del model.graph.output[:-1]  # Logits come last.
        OnnxNetwork(with_one_input(model, "net"), "net").list_layers(torch.ones(1, *SIZE), "all")
    except NetworkError as error:
        assert len(str(error)) <= MAX_TEXT, str(error)
    try:
        body = restore_body(data, SIZE, outputs=OUTPUTS)
        cost = body.cost
        assert cost is not None
        if cost.alive > MODEST_BYTES or cost.operations > MODEST_OPERATIONS:
            return
        outputs = body(torch.ones(2, *SIZE))
    except NetworkError as error:
        assert len(str(error)) <= MAX_TEXT, str(error)
        return
    model = parse_model(data, "again")
    check_model(model, "again")
    sizes = sizes_of(model, "again")
    assert [tuple(output.shape) for output in outputs] == [sizes[value.name][1] for value in model.graph.output]
