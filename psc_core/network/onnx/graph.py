"""Find the layers and the logits of an ONNX graph.

A layer is a tensor that the graph computes, named as in the file.  ``operations`` lists the outputs of convolutions,
poolings and products with weights, as in the paper; in a graph with attention, whose products lie inside blocks, it
lists the sums at the end of the blocks instead of products of tokens.  ``blocks`` lists these sums, and for
convolutional networks the sums of residual connections, after their activation.  ``all`` lists every tensor of
features.

Operations follow those whose outputs they read, as the format demands, so every property of the tensors is found in one
pass from first to last: the graph may be hostile, and may have 65,536 operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from psc_core.errors import NetworkError
from psc_core.network.layers import LayerInfo
from psc_core.network.layout import Form
from psc_core.network.onnx.sizes import BATCH, Shape

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_CONVOLUTIONS: Final = frozenset({"Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv"})
_PRODUCTS: Final = frozenset({"Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"})
_POOLINGS: Final = frozenset({"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"})
_SAME: Final = frozenset({"Cast", "DequantizeLinear", "Dropout", "Flatten", "Identity", "QuantizeLinear", "Reshape",
                          "Squeeze", "Unsqueeze"})  # fmt: skip
"""The operators that keep the values of a tensor, up to shape and rounding."""

_FLOATS: Final = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


class Graph:
    """The operations of a model, and the tensors that they read and write.

    Args:
        model: A model with one input and one output; see :mod:`.rewrite`.
        sizes: The sizes of its tensors, from :func:`psc_core.network.onnx.sizes.sizes_of`.
        batch: The number of images for which these sizes hold.
    """

    def __init__(self, model: ModelProto, sizes: Mapping[str, tuple[int, Shape]], batch: int = BATCH) -> None:
        self.nodes = tuple(model.graph.node)
        self.sizes = sizes
        self.batch = batch
        self.input: str = model.graph.input[0].name
        self.output: str = model.graph.output[0].name
        self.producers: dict[str, NodeProto] = {name: node for node in self.nodes for name in node.output if name}
        self.constants = {tensor.name for tensor in model.graph.initializer}
        """The names of tensors that do not depend on the image, such as weights and quantised weights."""
        for node in self.nodes:
            if self.constants.issuperset(filter(None, node.input)):
                self.constants.update(filter(None, node.output))

    @cached_property
    def logits(self) -> str:
        """The name of the logits: the input of a softmax at the end if there is one, otherwise the output."""
        for name in self._same_values(self.output):
            node = self.producers.get(name)
            if node is not None and node.op_type == "Softmax":
                return str(node.input[0])
        return self.output

    @cached_property
    def head(self) -> NodeProto | None:
        """The operation with weights that computes the logits, if there is one."""
        name = self.logits
        while True:
            *_, first = self._same_values(name)
            node = self.producers.get(first)
            if node is None or node.op_type in _CONVOLUTIONS | _PRODUCTS:
                return node
            computed = [str(each) for each in node.input if each not in self.constants]
            if node.op_type != "Add" or len(computed) != 1:  # adding a constant is a bias
                return None
            (name,) = computed

    def layers(self, granularity: str) -> list[LayerInfo]:
        """List the layers in the order of the graph; see the module docstring.

        Raises:
            NetworkError: If there are none.
        """
        layers = [layer for name in self._names(granularity) if (layer := self.layer(name)) is not None]
        if not layers:
            raise NetworkError(f"the graph has no layers of granularity {granularity!r}; use another one")
        order = {name: index for index, node in enumerate(self.nodes) for name in node.output}
        head_order = order[self.head.output[0]] if self.head is not None else len(self.nodes)
        hidden = [layer for layer in layers if order[layer.name] < head_order]
        outputs = [layer for layer in layers if order[layer.name] >= head_order]
        if self.head is not None:
            reads = list(self._same_values(str(self.head.input[0])))
            if not hidden or hidden[-1].name not in reads:
                penultimate = next((layer for name in reads[::-1] if (layer := self.layer(name))), None)
                hidden += [penultimate] if penultimate is not None else []
        roles = ["hidden"] * (len(hidden) - 1) + ["penultimate"] * bool(hidden) + ["output"] * len(outputs)
        if len(hidden) > 1 and self._carries_all(hidden[-2].name):
            roles[len(hidden) - 2] = "trunk"
        found = enumerate(zip([*hidden, *outputs], roles, strict=True))
        return [replace(layer, index=index, role=role) for index, (layer, role) in found]

    @property
    def classes(self) -> int:
        """The number of logits."""
        return self.sizes[self.logits][1][-1]

    def form(self, name: str) -> Form | None:
        """Return how a tensor holds its channels, or None if it is not a batch of float features."""
        known = self.sizes.get(name)
        if known is None or known[0] not in _FLOATS or known[1][:1] != (self.batch,) or name in self.constants:
            return None
        rank = len(known[1])
        if rank == 4:
            return "map_last" if name in self._channels_last else "map"
        return {2: "vector", 3: "tokens"}.get(rank)  # type: ignore[return-value]

    def layer(self, name: str) -> LayerInfo | None:
        """Describe a tensor as a hidden layer, or return None if it is not a batch of float features."""
        form = self.form(name)
        if form is None:
            return None
        shape = self.sizes[name][1]
        channels, grid = (shape[1], shape[2:]) if form == "map" else (shape[-1], shape[1:-1] or (1,))
        return LayerInfo(name, 0, form, (channels, math.prod(grid)), grid, "hidden")

    def _carries_all(self, name: str) -> bool:
        """Return whether the logits depend on the image through this tensor alone."""
        seen, waiting = {name}, [self.logits]
        while waiting:
            found = waiting.pop()
            if found == self.input:
                return False
            if found not in seen and found in self.producers:
                waiting += [str(each) for each in self.producers[found].input]
            seen.add(found)
        return True

    def _names(self, granularity: str) -> Iterator[str]:
        ends = self._ends_of_blocks()
        attends = any(node.op_type == "Softmax" and str(node.input[0]) != self.logits for node in self.nodes)
        for node in self.nodes:
            name = str(node.output[0]) if node.output else ""
            is_block = name in ends
            if granularity == "all":
                yield from (str(each) for each in node.output if each)
            elif granularity == "blocks" or (attends and self._is_of_tokens(name)):
                yield from [name] * is_block
            elif self._is_operation(node):
                yield name

    def _is_operation(self, node: NodeProto) -> bool:
        if node.op_type in _CONVOLUTIONS | _POOLINGS:
            return True
        if node.op_type in _PRODUCTS:
            return any(name in self.constants for name in node.input)
        return node.op_type == "ReduceMean" and self._pools(node)

    def _pools(self, node: NodeProto) -> bool:
        """Return whether a mean is taken over all positions of a map, or over all tokens."""
        before, after = self.sizes.get(str(node.input[0])), self.sizes.get(str(node.output[0]))
        if before is None or after is None or len(before[1]) < 3:
            return False
        channels = before[1][1] if self.form(str(node.input[0])) == "map" else before[1][-1]
        kept = [side for side in after[1][1:] if side != 1] or [1]
        return kept == [channels]

    def _is_of_tokens(self, name: str) -> bool:
        known = self.sizes.get(name)
        return known is not None and (len(known[1]) == 3 or self.form(name) == "map_last")

    def _ends_of_blocks(self) -> set[str]:
        """Return the sums that end residual blocks, after their activation; a sum after attention ends no block."""
        sums, attends = dict(self._sums()), set[str]()
        ends = set()
        for node in self.nodes:
            is_of_attention = node.op_type == "Softmax" or not attends.isdisjoint(node.input)
            if sums.keys().isdisjoint(node.output):
                attends.update(node.output if is_of_attention else ())
            elif not is_of_attention:
                ends.add(sums[node.output[0]])
        return ends or set(sums.values())

    def _sums(self) -> Iterator[tuple[str, str]]:
        """Yield each sum of two feature tensors of the same shape, with the tensor after its activation."""
        readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                readers.setdefault(str(name), []).append(node)
        for node in self.nodes:
            shapes = [self.sizes.get(str(name)) for name in node.input]
            if node.op_type != "Add" or any(name in self.constants for name in node.input) or shapes[0] != shapes[1]:
                continue
            total = str(node.output[0])
            after = readers.get(total, [])
            is_activated = len(after) == 1 and after[0].op_type in ("Relu", "Clip")
            yield total, str(after[0].output[0]) if is_activated else total

    def _same_values(self, name: str) -> Iterator[str]:
        """Yield the tensor and the tensors before it that have the same values."""
        while True:
            yield name
            node = self.producers.get(name)
            if node is None or node.op_type not in _SAME:
                return
            name = str(node.input[0])

    @cached_property
    def _channels_last(self) -> set[str]:
        """The tensors whose last axis holds the channels, decided by the nearest operation before them with a rule."""
        nearest: dict[str, tuple[int, bool]] = {}  # number of operations since the rule, and its answer
        for node in self.nodes:
            rule = _gives_channels_last(node)
            before = [nearest[name] for name in node.input if name in nearest and name not in self.constants]
            if rule is not None:
                nearest.update(dict.fromkeys(node.output, (0, rule)))
            elif before:
                distance, answer = min(before, key=itemgetter(0))
                nearest.update(dict.fromkeys(node.output, (distance + 1, answer)))
        return {name for name, (_, answer) in nearest.items() if answer}


def _gives_channels_last(node: NodeProto) -> bool | None:
    """Return whether an operation puts the channels last; None if it keeps the layout of its input."""
    if node.op_type in _CONVOLUTIONS | _POOLINGS | {"BatchNormalization", "InstanceNormalization"}:
        return False
    if node.op_type in ("MatMul", "LayerNormalization"):
        return True
    order = next((list(each.ints) for each in node.attribute if each.name == "perm"), [])
    is_between = node.op_type == "Transpose" and order in ([0, 3, 1, 2], [0, 2, 3, 1])
    return order == [0, 2, 3, 1] if is_between else None
