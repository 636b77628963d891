"""Rewrite an ONNX graph into the form that PSC runs, and cut it after its layers.

The input is float32 (batch, channels, height, width), with any number of images if the graph allows it.  A cut graph
has one output for each layer, of the canonical shape (batch, channels, positions), followed by the logits if they are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from psc_core.errors import NetworkError
from psc_core.network.layers import LayerInfo

if TYPE_CHECKING:
    from onnx import ModelProto

INPUT_NAME: Final = "images"
"""The name of the input of a rewritten graph."""

ANY: Final = "batch"
"""The name of the batch axis if it may have any length."""

_CHANNELS: Final = (1, 3)
_PSC: Final = "psc:"
"""The prefix of the names of added tensors."""


def with_one_input(model: ModelProto, origin: str) -> ModelProto:
    """Return a model whose only input is ``images``, float32 (batch, channels, height, width).

    An input of another dtype is converted, an input with its channels last is transposed.

    Raises:
        NetworkError: If there are several inputs, or the input is not a batch of images.
    """
    import onnx
    from onnx import helper

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
    return model


def with_size(model: ModelProto, size: tuple[int, int, int], origin: str) -> ModelProto:
    """Return a model for images of one size (channels, height, width).

    Raises:
        NetworkError: If the model is for another size.
    """
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
    """Return a model that computes only the canonical features of ``layers``, and the logits if given.

    ``logits`` are the name and the width of the logits tensor, which becomes the last output.
    """
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
    """Delete everything that the wanted tensors do not need."""
    graph, needed = model.graph, set(wanted)
    kept = []
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    nodes = [_copy(node) for node in kept[::-1]]
    constants = [_copy(tensor) for tensor in constants]
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
    """Return the length of an axis, or its name."""
    return int(axis.dim_value) if axis.HasField("dim_value") else str(axis.dim_param or "?")
