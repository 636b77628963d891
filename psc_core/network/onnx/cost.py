"""Estimate the cost of an ONNX graph for one image: the peak memory of its tensors, and its operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from psc_core.network.onnx.sizes import Shape

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_CONVOLUTIONS: Final = frozenset({"Conv", "ConvInteger", "QLinearConv"})
_PRODUCTS: Final = frozenset({"Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"})


class Cost(NamedTuple):
    """The cost of one image."""

    alive: int  # peak size of the tensors that exist at the same time, bytes
    operations: int  # additions and multiplications of convolutions and products; of other nodes, the largest tensor


def cost_of(model: ModelProto, sizes: Mapping[str, tuple[int, Shape]], batch: int) -> Cost:
    """Count the cost of a graph, divided by ``batch``, the number of images for which ``sizes`` were found."""
    from onnx import helper

    def nbytes(name: str) -> int:
        dtype, shape = sizes.get(name, (0, ()))
        return math.prod(shape) * helper.tensor_dtype_to_np_dtype(dtype).itemsize if dtype else 0

    nodes, kept = model.graph.node, {value.name for value in model.graph.output}
    last = {name: index for index, node in enumerate(nodes) for name in node.input}
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    alive = most = nbytes(model.graph.input[0].name)
    operations = 0
    for index, node in enumerate(nodes):
        alive += sum(nbytes(name) for name in node.output)
        most = max(most, alive)
        ended = {name for name in (*node.input, *node.output) if last.get(name, index) == index}
        alive -= sum(nbytes(name) for name in ended - kept)
        operations += _operations(node, sizes, weights)
    return Cost(-(-most // batch), -(-operations // batch))


def _operations(node: NodeProto, sizes: Mapping[str, tuple[int, Shape]], weights: Mapping[str, Shape]) -> int:
    def shape(name: str) -> Shape:
        return weights.get(name) or sizes.get(name, (0, ()))[1]

    if node.op_type in _CONVOLUTIONS:
        weight = node.input[3 if node.op_type == "QLinearConv" else 1]
        return 2 * math.prod(shape(node.output[0])) * math.prod(shape(weight)[1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(shape(node.input[0])) * math.prod(shape(node.input[1])[1:])
    if node.op_type in _PRODUCTS:
        return 2 * math.prod(shape(node.output[0])) * (shape(node.input[0]) or (1,))[-1]
    return max((math.prod(shape(name)) for name in (*node.input, *node.output) if name), default=0)
