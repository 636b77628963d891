"""Find the size of each tensor of an untrusted ONNX graph before anything is computed.

Operations are visited one by one, in order: ``onnx`` infers each shape from those before it, so tensors that grow out
of each other stop at the first that is too large, and no operation costs more than itself.  Only the few integers that
determine sizes are computed; ``onnx`` could propagate them too, but without a limit on their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from psc_core.errors import NetworkError, shortened
from psc_core.network.onnx.model import MAX_AXES, first_line, quoted

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

Shape = tuple[int, ...]

BATCH: Final = 2
"""The number of images for which sizes are found; two tell the batch axis from an axis of length one."""

MAX_ELEMENTS: Final = 1 << 28
"""Maximum number of elements of a tensor for a batch of two images."""

MAX_FOLDED: Final = 1 << 10
"""Maximum number of integers in a tensor that determines sizes."""

_ON_SIZES: Final = (
    "Add Cast Concat Constant ConstantOfShape Div Gather Mul Range Reshape Slice Squeeze Sub Transpose Unsqueeze"
)
_FOLDED: Final = frozenset(_ON_SIZES.split())
"""The operators on sizes that are computed, to know the shapes that depend on them."""

_MAX_BOUND: Final = 1 << 61
"""Maximum of the numbers of a range, because ``onnx`` and NumPy miscount its length when they overflow."""

_FLOAT, _INT32, _INT64 = 1, 6, 7
_INTEGERS: Final = (_INT32, _INT64)


def sizes_of(model: ModelProto, origin: str) -> dict[str, tuple[int, Shape]]:
    """Return the element type and shape of the input and of each computed tensor, for a batch of two images.

    The model has one input (batch, …), of which every size but the batch is known.

    Raises:
        NetworkError: If a size is unknown before computing or above :data:`MAX_ELEMENTS`, or there are more than
            :data:`.MAX_AXES` axes.
    """
    given = model.graph.input[0]
    sides = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in given.type.tensor_type.shape.dim]
    if not sides or min(sides[1:], default=0) < 0:
        raise NetworkError(f"{origin}: expected images of a known size, got {sides[:MAX_AXES]}; export it again")
    sides[0] = BATCH if sides[0] < 0 else sides[0]
    constants = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name != given.name}
    walk = _Walk(model, origin, {}, constants)
    walk.add(given.name, given.type.tensor_type.elem_type, tuple(sides))
    for node in model.graph.node:
        for name, (dtype, shape) in walk.infer(node).items():
            if shape is None:
                raise NetworkError(
                    f"{origin}: the size of {quoted(name)} ({node.op_type}) is not known before it is computed; export "
                    "the network with fixed image sizes"
                )
            walk.add(name, dtype, shape)
        result = walk.compute(node)
        if result is not None:
            constants[result.name] = result
    return walk.sizes


@dataclass(frozen=True)
class _Walk:
    """The sizes and the small constants of all tensors before the current operation."""

    model: ModelProto  # the model that is walked
    origin: str  # the name of the model in messages
    sizes: dict[str, tuple[int, Shape]]  # the type and shape of each computed tensor; grows
    constants: dict[str, TensorProto]  # the constants by name, and those computed from them; grows

    def add(self, name: str, dtype: int, shape: Shape) -> None:
        """Record a tensor, or raise :class:`NetworkError` if it is too large."""
        if len(shape) > MAX_AXES or math.prod(shape) > MAX_ELEMENTS:
            raise NetworkError(
                f"{self.origin}: tensor {quoted(name)} has the shape {shortened(str(shape))}, expected at most "
                f"{MAX_ELEMENTS} elements for {BATCH} images and {MAX_AXES} axes; use smaller images or another network"
            )
        self.sizes[name] = dtype, shape

    def infer(self, node: NodeProto) -> dict[str, tuple[int, Shape | None]]:
        """Return the type and shape of each output of an operation; None for an unknown shape.

        Inference sees the numbers of a constant only if they are few, because each could become an axis.
        """
        from onnx import helper, shape_inference

        inputs, shown = [], []
        for name in dict.fromkeys(name for name in node.input if name):
            constant = self.constants.get(name)
            if constant is not None and _is_few(constant.dims):
                shown.append(constant)
            elif constant is not None or name in self.sizes:
                known = self.sizes[name] if constant is None else (constant.data_type, constant.dims)
                inputs.append(helper.make_tensor_value_info(name, *known))
            else:
                raise NetworkError(f"{self.origin}: nothing gives {quoted(name)}, which {node.op_type} reads")
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "one", inputs, outputs, shown)
        alone = helper.make_model(graph, opset_imports=self.model.opset_import)
        try:
            inferred = shape_inference.infer_shapes(alone, check_type=True, strict_mode=True)
        except Exception as error:  # onnx raises its own types, and RuntimeError
            raise NetworkError(f"{self.origin}: its shapes do not fit together: {first_line(error)}") from error
        return {value.name: _size(value.type.tensor_type) for value in inferred.graph.output}

    def compute(self, node: NodeProto) -> TensorProto | None:
        """Return the result of an operation that may determine sizes, if it has few integers computed from few."""
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator

        name = node.output[0] if node.output else ""
        dtype, shape = self.sizes.get(name, (0, ()))
        if node.op_type == "Shape" and node.input[0] in self.sizes:
            bounds = {attribute.name: attribute.i for attribute in node.attribute}
            lengths = self.sizes[node.input[0]][1][bounds.get("start", 0) : bounds.get("end")]
            return numpy_helper.from_array(np.array(lengths, np.int64), name)
        if node.op_type not in _FOLDED or not _is_few(shape) or not _is_of_sizes(dtype, node.op_type):
            return None
        given = {each: self.constants.get(each) for each in node.input if each}
        known = {
            each: numpy_helper.to_array(constant)
            for each, constant in given.items()
            if constant is not None and constant.data_type in _INTEGERS and _is_few(constant.dims)
        }
        if len(known) < len(given):
            return None
        opsets = {imported.domain: imported.version for imported in self.model.opset_import}
        try:
            if node.op_type == "Range" and any(abs(int(number)) > _MAX_BOUND for number in known.values()):
                raise ValueError("its bounds are too large")
            result: Any = ReferenceEvaluator(node, opsets=opsets).run(None, known)
            return numpy_helper.from_array(np.asarray(result[0]).reshape(shape), name)
        except Exception as error:  # NumPy and onnx raise many types
            raise NetworkError(
                f"{self.origin}: {node.op_type} of sizes cannot be computed: {first_line(error)}"
            ) from error


def _is_few(shape: Sequence[int]) -> bool:
    return math.prod(shape) <= MAX_FOLDED


def _is_of_sizes(dtype: int, operator: str) -> bool:
    """Return whether a tensor may determine sizes; the scale factors of images are constant floats."""
    return dtype in _INTEGERS or (dtype == _FLOAT and operator == "Constant")


def _size(tensor_type: Any) -> tuple[int, Shape | None]:
    """Return the element type and shape of an inferred type; None if the shape is not fully known."""
    sides = tuple(axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor_type.shape.dim)
    return tensor_type.elem_type, sides if tensor_type.HasField("shape") and min(sides, default=0) >= 0 else None
