"""Find the layers and the logits of an ONNX graph, rewrite it into the form that PSC runs, and cut it after its layers.

A layer is a tensor that the graph computes, named as in the file.  ``operations`` lists the outputs of convolutions,
poolings and products with weights, as in the paper; in a graph with attention, whose products lie inside blocks, it
lists the sums at the end of the blocks instead of products of tokens.  ``blocks`` lists these sums, and for
convolutional networks the sums of residual connections, after their activation.  ``all`` lists every tensor of
features.

Operations follow those whose outputs they read, as the format demands, so every property of the tensors is found in one
pass from first to last: the graph may be hostile, and may have 65,536 operations.

The input of a rewritten graph is float32 (batch, channels, height, width), with any number of images if the graph
allows it.  A cut graph has one output for each layer, of the canonical shape (batch, channels, positions), followed by
the logits if they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from psc_core.errors import NetworkError
from psc_core.network.layers import Form, LayerInfo
from psc_core.network.onnx_check import BATCH, Shape

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


_CONVOLUTIONS: Final = frozenset({"Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv"})
_PRODUCTS: Final = frozenset({"Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"})
_POOLINGS: Final = frozenset({"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"})
# The operators that keep the values of a tensor, up to shape and rounding.
_SAME: Final = frozenset({"Cast", "DequantizeLinear", "Dropout", "Flatten", "Identity", "QuantizeLinear", "Reshape",
                          "Squeeze", "Unsqueeze"})  # fmt: skip

_FLOATS: Final = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


class Graph:
    def __init__(self, model: ModelProto, sizes: Mapping[str, tuple[int, Shape]], batch: int = BATCH) -> None:
        self.nodes = tuple(model.graph.node)
        self.sizes = sizes
        self.batch = batch
        self.input: str = model.graph.input[0].name
        self.outputs = tuple(output.name for output in model.graph.output)
        self.output = self.outputs[0]
        self.producers: dict[str, NodeProto] = {name: node for node in self.nodes for name in node.output if name}
        # The names of tensors that do not depend on the image, such as weights and quantised weights.
        self.constants = {tensor.name for tensor in model.graph.initializer}
        for node in self.nodes:
            if self.constants.issuperset(filter(None, node.input)):
                self.constants.update(filter(None, node.output))

    @cached_property
    def logits(self) -> str:
        return self.logits_of(self.output)

    def logits_of(self, output: str) -> str:
        """Return the name of the logits: the input of a softmax at the end if there is one, otherwise the output."""
        for name in self._same_values(output):
            node = self.producers.get(name)
            if node is not None and node.op_type == "Softmax":
                return str(node.input[0])
        return output

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
        """List the layers in the order of the graph; see the module docstring."""
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
            if granularity == "all":
                yield from (str(each) for each in node.output if each)
            elif granularity == "blocks" or (attends and self._is_of_tokens(name)):
                yield from [name] * (name in ends)
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


INPUT_NAME: Final = "images"  # the name of the input of a rewritten graph
ANY: Final = "batch"  # the name of the batch axis if it may have any length
_CHANNELS: Final = (1, 3)
_PSC: Final = "psc:"  # the prefix of the names of added tensors


def with_one_input(model: ModelProto, origin: str) -> ModelProto:
    """Return a model whose only input is ``images``, float32 (batch, channels, height, width), which is converted."""
    import onnx
    from onnx import helper, numpy_helper

    model = _copy(model)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.value_info[:]
    sides = [_side(axis) for axis in inputs[0].type.tensor_type.shape.dim] if len(inputs) == 1 else []
    if len(sides) != 4:
        listed = ", ".join(
            f"{value.name} {[_side(axis) for axis in value.type.tensor_type.shape.dim]}" for value in inputs
        )
        raise NetworkError(
            f"{origin}: expected one input of images (batch, channels, height, width), got {listed}; export the "
            "network alone"
        )
    (old,), is_last = inputs, sides[1] not in _CHANNELS and sides[3] in _CHANNELS
    if is_last:
        sides = [sides[0], sides[3], sides[1], sides[2]]
    name, before = old.name, []
    if INPUT_NAME in constants.union(*(node.output for node in graph.node)):
        raise NetworkError(f"{origin}: expected no tensor named {INPUT_NAME!r} but the input; rename it")
    source, dtype = INPUT_NAME, old.type.tensor_type.elem_type
    if dtype not in _FLOATS:  # A level of 200 comes as 199.99998, of which a cast leaves 199; Round needs opset 11.
        graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), f"{_PSC}half"))
        before.append(helper.make_node("Add", [source, f"{_PSC}half"], [source := f"{_PSC}above"]))
        before.append(helper.make_node("Floor", [source], [source := f"{_PSC}level"]))
    if dtype != onnx.TensorProto.FLOAT:
        before.append(helper.make_node("Cast", [source], [source := f"{_PSC}cast"], to=dtype))
    if is_last:
        before.append(helper.make_node("Transpose", [source], [source := f"{_PSC}last"], perm=[0, 2, 3, 1]))
    for node in graph.node:
        node.input[:] = [source if each == name else each for each in node.input]
    for added in before[::-1]:
        graph.node.insert(0, added)
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info(INPUT_NAME, onnx.TensorProto.FLOAT, sides))
    model.ir_version = max(model.ir_version, 4)  # Before that, every constant had to be an input too.
    return model


def with_size(model: ModelProto, size: tuple[int, int, int], origin: str) -> ModelProto:
    model = _copy(model)
    axes = model.graph.input[0].type.tensor_type.shape.dim
    given = tuple(_side(axis) for axis in axes)[1:]
    if any(isinstance(axis, int) and axis != side for axis, side in zip(given, size, strict=True)):
        raise NetworkError(
            f"{origin} is for images of {' × '.join(map(str, given))} (channels, height, width), got "
            f"{' × '.join(map(str, size))}; give its own size (--size, --preset, --preprocess)"
        )
    for axis, side in zip(list(axes)[1:], size, strict=True):
        axis.dim_value = side
    if not axes[0].HasField("dim_value"):
        axes[0].dim_param = ANY
    return model


def with_any_batch(model: ModelProto) -> ModelProto:
    """Return a model whose batch may have any length; it fails at run time if the graph relies on a length of one."""
    from onnx import numpy_helper

    model = _copy(model)
    axis = model.graph.input[0].type.tensor_type.shape.dim[0]
    if axis.HasField("dim_value"):
        axis.dim_param = ANY
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                constants[node.output[0]] = node.attribute[0].t
        for number, node in enumerate(model.graph.node):
            shape = constants.get(node.input[1]) if node.op_type == "Reshape" else None
            if shape is None:
                continue
            sides = numpy_helper.to_array(shape).copy()
            if len(sides) and sides[0] == 1:
                sides[0] = 0 if -1 in sides else -1
                model.graph.initializer.append(numpy_helper.from_array(sides, f"{_PSC}shape{number}"))
                node.input[1] = f"{_PSC}shape{number}"
    return model


def cut(model: ModelProto, layers: Sequence[LayerInfo], logits: tuple[str, int] | None = None) -> ModelProto:
    """Return a model that computes only canonical features of ``layers``, then the logits, given as name and width."""
    import onnx
    from onnx import helper, numpy_helper

    model = _copy(model)
    graph = model.graph
    outputs: list[tuple[str, list[int]]] = []
    flat = {"map": [0, 0, -1], "map_last": [0, -1, 0], "vector": [0, -1, 1], "tokens": []}
    for number, layer in enumerate(layers):
        value, sides = layer.name, flat[layer.form]
        if layer.form == "map_last":
            graph.node.append(
                helper.make_node("Transpose", [value], [value := f"{_PSC}first{number}"], perm=[0, 3, 1, 2])
            )
            sides = flat["map"]
        if layer.form == "tokens":
            graph.node.append(helper.make_node("Transpose", [value], [value := f"{_PSC}layer{number}"], perm=[0, 2, 1]))
        else:
            graph.initializer.append(numpy_helper.from_array(np.array(sides, np.int64), f"{_PSC}sides{number}"))
            node = helper.make_node("Reshape", [value, f"{_PSC}sides{number}"], [value := f"{_PSC}layer{number}"])
            graph.node.append(node)
        outputs.append((value, [*layer.shape]))
    if logits is not None:
        outputs.append((logits[0], [logits[1]]))
    batch = _side(graph.input[0].type.tensor_type.shape.dim[0])
    del graph.output[:]
    for number, (name, shape) in enumerate(outputs):
        final = f"{_PSC}output{number}"
        graph.node.append(helper.make_node("Cast", [name], [final], to=onnx.TensorProto.FLOAT))
        graph.output.append(helper.make_tensor_value_info(final, onnx.TensorProto.FLOAT, [batch, *shape]))
    _prune(model, [output.name for output in graph.output])
    remove_notes(model)
    return model


def remove_notes(model: ModelProto) -> None:
    """Delete the notes of exporters, which hold stack traces with paths of the exporting machine."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")


def _prune(model: ModelProto, wanted: Sequence[str]) -> None:
    graph, needed = model.graph, set(wanted)
    kept = []
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    nodes = [_copy(node) for node in kept[::-1]]
    constants = [_copy(tensor) for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:]
    del graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants)
    del graph.value_info[:]


def _copy(message: Any) -> Any:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def _side(axis: Any) -> int | str:
    return int(axis.dim_value) if axis.HasField("dim_value") else str(axis.dim_param or "?")
