import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from psc_core.network import onnx_graph
from psc_core.network.onnx_check import sizes_of
from psc_core.network.onnx_graph import Graph

node = helper.make_node
DEEPER = sys.getrecursionlimit() + 100


def chained(operator: str, first: str, last: str, count: int, *others: str) -> list[NodeProto]:
    """Operations of which each reads the one before, and ``others``."""
    names = [first, *(f"{last}{number}" for number in range(count - 1)), last]
    return [node(operator, [before, *others], [after]) for before, after in pairwise(names)]


def plain(count: int) -> list[NodeProto]:
    return chained("Relu", "map", "end", count)


def sums_behind_a_chain(count: int) -> list[NodeProto]:
    """Whether attention lies before a sum is asked of each."""
    return [*chained("Neg", "map", "chain", count), *(node("Add", ["chain"] * 2, [f"sum{n}"]) for n in range(count)),
            node("Identity", ["sum0"], ["end"])]  # fmt: skip


def constants_of_constants(count: int) -> list[NodeProto]:
    """Each reads the one before twice: two to the power of their number ways lead back."""
    doubled = [node("Add", [f"weight{n}"] * 2, [f"weight{n + 1}"]) for n in range(count)]
    return [*doubled, node("Conv", ["map", f"weight{count}"], ["end"])]


def channels_last(count: int) -> list[NodeProto]:
    """Each tensor's axes are those of the operation at the chain's begin."""
    turned = node("Transpose", ["map"], ["turned"], perm=[0, 2, 3, 1])
    return [turned, *chained("Neg", "turned", "chain", count), node("Transpose", ["chain"], ["end"], perm=[0, 3, 1, 2])]


def biases(count: int) -> list[NodeProto]:
    """What makes the logits lies before all of them, as far as one can tell."""
    return [node("Neg", ["map"], ["end"])]


def built(middle: list[NodeProto], count: int) -> Graph:
    values = {"weights": np.ones((4, 1, 3, 3)), "weight0": np.ones((4, 4, 1, 1)), "head": np.ones((4, 3)),
              "bias": np.ones(3)}  # fmt: skip
    nodes = [
        node("Conv", ["images", "weights"], ["map"]),
        *middle,
        node("Add", ["end", "end"], ["block"]),
        node("GlobalAveragePool", ["block"], ["pooled"]),
        node("Flatten", ["pooled"], ["vector"]),
        node("MatMul", ["vector", "head"], ["product"]),
        *chained("Identity", "product", "same", count),
        *chained("Add", "same", "logits", count, "bias"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [value("images", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [value("logits", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(each.astype(np.float32), name) for name, each in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    return Graph(model, sizes_of(model, "test"))


def lines_of(graph: Graph) -> int:
    """Lines of the module that are run to list the layers, loops counted."""
    count = 0

    def traced(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != onnx_graph.__file__:
            return None
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        for granularity in ("operations", "blocks", "all"):
            graph.layers(granularity)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("middle", [plain, sums_behind_a_chain, constants_of_constants, channels_last, biases])
def test_layers_of_long_graphs_are_listed_in_linear_time(middle: Callable[[int], list[NodeProto]]) -> None:
    once, twice = (lines_of(built(middle(count), count)) for count in (DEEPER // 4, DEEPER // 2))
    assert twice < 2.2 * once
    assert built(middle(DEEPER), DEEPER).layers("all")


def test_a_constant_is_what_is_made_of_constants() -> None:
    found = built(constants_of_constants(3), 1)
    assert {"weight0", "weight3", "head"} <= found.constants
    assert found.constants.isdisjoint({"images", "map", "end"})
    assert [layer.name for layer in found.layers("operations")] == ["map", "end", "pooled", "product"]
