"""Read an untrusted ONNX model, and refuse it if it could do more than compute a network.

A model passes if its operators are standard ones, without random numbers, subgraphs, functions, sequences, texts or
sizes that depend on values; if all its constants are in the file or in a file beside it; and if every tensor has a
bounded size that is known beforehand.

The cost of parsing depends on the number of fields, not on the number of bytes: two bytes can encode an empty message
that takes a hundred bytes as an object.  So the fields of an untrusted message are counted before it is parsed.

Sizes are found operation by operation, in order: ``onnx`` infers each shape from those before it, so tensors that grow
out of each other stop at the first that is too large, and no operation costs more than itself.  Only the few integers
that determine sizes are computed; ``onnx`` could propagate them too, but without a limit on their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from psc_core.errors import ImageError, NetworkError, needs, shorten
from psc_core.images.files import read_file

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto


VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
GROUPS: Final = (3, 4)  # the wire types that begin and end a group


def fields(body: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield the number, wire type and content of each field up to a malformed one; a group's fields follow it."""
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        start, wire_type = at, tag & 7
        if wire_type == VARINT:
            _, at = _varint(body, at)
        elif wire_type == FIXED64:
            at += 8
        elif wire_type == FIXED32:
            at += 4
        elif wire_type == LENGTH:
            size, start = _varint(body, at)
            at = start + size
        elif wire_type not in GROUPS:
            return
        yield tag >> 3, wire_type, body[start:at]


def _varint(body: memoryview, at: int) -> tuple[int, int]:
    """Return a number of at most ten bytes, and the position after it."""
    value = 0
    for place, byte in enumerate(body[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    return value, len(body)


MAX_FILE_BYTES: Final = (1 << 31) - 1  # maximum size of a model in bytes, the limit of the format
MAX_NODES: Final = 1 << 16  # maximum number of operations
MAX_FIELDS: Final = 1 << 20  # of the file, at all levels; a parsed field takes a hundred bytes and more
MAX_DEPTH: Final = 32  # maximum nesting of messages; a model without graphs inside operations has seven levels
MIN_OPSET: Final = 7  # the oldest supported version of the operators
MAX_AXES: Final = 32  # of a tensor; without a limit a graph could double the number again and again
_NOT_REPEATABLE: Final = "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
_SIZED_BY_VALUES: Final = "Compress NonMaxSuppression NonZero Unique"
_NOT_OF_TENSORS: Final = (
    "ConcatFromSequence ImageDecoder Optional OptionalGetElement OptionalHasElement RegexFullMatch SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence "
    "StringConcat StringNormalizer StringSplit TfIdfVectorizer"
)
_REFUSED: Final = frozenset(f"{_NOT_REPEATABLE} {_SIZED_BY_VALUES} {_NOT_OF_TENSORS}".split())


def read_onnx(path: Path) -> ModelProto:
    """Read an ONNX file that the user names, with the constants in the files beside it."""
    model = parse_model(_read(path), str(path))
    folder = path.parent.resolve()
    for tensor in _tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            _fill(tensor, folder, str(path))
    check_model(model, str(path))
    return model


def files_of_model(path: Path) -> tuple[Path, ...]:
    """Return the files of a model: the ONNX file and the files beside it that hold constants."""
    model, folder = parse_model(_read(path), str(path)), path.parent.resolve()
    outside = [tensor for tensor in _tensors(model) if tensor.data_location == tensor.EXTERNAL]
    return (path, *sorted({_place(tensor, folder, str(path)) for tensor in outside}))


def parse_model(data: bytes, origin: str) -> ModelProto:
    """Parse a serialized model; ``origin`` names it in messages."""
    model: ModelProto = needs(origin, "onnx", "onnx", error=NetworkError).ModelProto()
    if sum(1 for _ in islice(_fields(memoryview(data), model.DESCRIPTOR, origin), MAX_FIELDS + 1)) > MAX_FIELDS:
        raise NetworkError(f"{origin}: expected at most {MAX_FIELDS} fields, got more; export a smaller network")
    try:
        model.ParseFromString(data)
    except needs(origin, "onnx", "google.protobuf.message", error=NetworkError).DecodeError as error:
        raise NetworkError(f"{origin} is not an ONNX file; export the network with torch.onnx.export") from error
    if not model.graph.node:
        raise NetworkError(f"{origin} is not an ONNX file with a network; export it with torch.onnx.export")
    return model


def _fields(body: memoryview, message: Any, origin: str, depth: int = 0) -> Iterator[None]:
    """Yield once for every field of a serialized message, at all levels, before any field becomes an object."""
    if depth > MAX_DEPTH:
        raise NetworkError(f"{origin}: expected at most {MAX_DEPTH} messages inside each other; export it again")
    for number, wire_type, content in fields(body):
        yield
        field = message.fields_by_number.get(number)
        if field is not None and field.message_type is not None and wire_type == LENGTH:
            yield from _fields(content, field.message_type, origin, depth + 1)


def check_model(model: ModelProto, origin: str) -> None:
    """Refuse a model with anything but ONNX's standard operators on tensors and constants inside the file."""
    import onnx

    foreign = {node.domain for node in model.graph.node} - {"", "ai.onnx"} or {each.name for each in model.functions}
    if foreign:
        names = ", ".join(shorten(name) for name in sorted(map(str, foreign))[:3])  # bytes if not UTF-8
        raise NetworkError(f"{origin} uses operators of {names}, expected ONNX's own; export it without them")
    if max((imported.version for imported in model.opset_import), default=0) < MIN_OPSET:
        raise NetworkError(f"{origin}: expected version {MIN_OPSET} of ONNX's operators or newer; export it again")
    if len(model.graph.node) > MAX_NODES:
        raise NetworkError(f"{origin}: expected at most {MAX_NODES} operations, got {len(model.graph.node)}")
    false = {tensor.name for tensor in model.graph.initializer if not tensor.dims and tensor.raw_data in (b"", b"\0")}
    for node in model.graph.node:
        if any(isinstance(name, bytes) for name in (*node.input, *node.output)):
            raise NetworkError(f"{origin} has a tensor whose name is not in UTF-8; export it again")
        is_known = isinstance(node.op_type, str) and onnx.defs.has(node.op_type)  # bytes if not UTF-8
        if node.op_type in _REFUSED or not is_known:
            raise NetworkError(
                f"{origin}: the operator {quote(node.op_type)} is not supported; export the network without it"
            )
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] not in false:
            raise NetworkError(f"{origin} has a dropout that may be active; export the network in evaluation mode")
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise NetworkError(
                f"{origin}: the operator {node.op_type} holds a graph of its own, which is not supported; export the "
                "network without control flow"
            )
    parts = (attribute for node in model.graph.node for attribute in node.attribute)
    if model.graph.sparse_initializer or any(each.HasField("sparse_tensor") or each.sparse_tensors for each in parts):
        raise NetworkError(f"{origin} has sparse constants, which are not supported; store them dense")
    for tensor in _tensors(model):
        _check_tensor(tensor, origin)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise NetworkError(f"{origin} is not a valid ONNX model: {first_line(error)}; export it again") from error


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_tensor(tensor: TensorProto, origin: str) -> None:
    """Refuse a constant whose data is not complete inside the model, before its size is allocated."""
    from onnx import helper

    if tensor.data_location == tensor.EXTERNAL or tensor.external_data:
        raise NetworkError(
            f"{origin}: the constant {quote(tensor.name)} lies in another file; store it inside the model"
        )
    if isinstance(tensor.name, bytes):
        raise NetworkError(f"{origin} has a tensor whose name is not in UTF-8; export it again")
    is_numeric = tensor.data_type in helper.get_all_tensor_dtypes() and tensor.data_type != tensor.STRING
    if not is_numeric or min(tensor.dims, default=0) < 0:
        raise NetworkError(
            f"{origin}: the constant {quote(tensor.name)} is not an array of numbers; export the model again"
        )
    if len(tensor.dims) > MAX_AXES:
        raise NetworkError(
            f"{origin}: the constant {quote(tensor.name)} has {len(tensor.dims)} axes, expected at most {MAX_AXES}; "
            "export the model again"
        )
    size = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        expected, got = (size * _bits(tensor.data_type) + 7) // 8, len(tensor.raw_data)
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        per_number = 2 if tensor.data_type in (tensor.COMPLEX64, tensor.COMPLEX128) else 1
        expected, got = size * per_number, len(getattr(tensor, field))
        if _bits(tensor.data_type) < 8:  # several are packed into one number
            expected = (size * _bits(tensor.data_type) + 7) // 8
    if expected != got:
        raise NetworkError(
            f"{origin}: the constant {quote(tensor.name)} claims the shape {tuple(tensor.dims)}, its data has another "
            "size; export the model again"
        )


def _bits(data_type: int) -> int:
    from onnx import TensorProto, helper

    if data_type in (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1):
        return 4
    return 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def _place(tensor: TensorProto, folder: Path, origin: str) -> Path:
    location = _where(tensor).get("location", "")
    file = folder / location
    try:
        is_inside = file.resolve(strict=True).is_relative_to(folder) and file.is_file()
        if not is_inside:
            raise ValueError("it is not a file in the model's folder")
    except (OSError, ValueError) as error:
        raise _unreadable(tensor, origin, error) from error
    return file


def _fill(tensor: TensorProto, folder: Path, origin: str) -> None:
    """Read a constant from its own file in the model's folder."""
    where, file = _where(tensor), _place(tensor, folder, origin)
    try:
        offset, length = int(where.get("offset", 0)), int(where.get("length", -1))
        if offset < 0:
            raise ValueError("it begins before the file")
        with file.open("rb") as stream:
            size = file.stat().st_size - offset
            if length > size:
                raise ValueError("it is too short")
            stream.seek(offset)
            tensor.raw_data = stream.read(size if length < 0 else length)
    except (OSError, ValueError) as error:
        raise _unreadable(tensor, origin, error) from error
    tensor.data_location = tensor.DEFAULT
    del tensor.external_data[:]


def _where(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _unreadable(tensor: TensorProto, origin: str, error: Exception) -> NetworkError:
    reason = getattr(error, "strerror", None) or error
    return NetworkError(
        f"{origin}: cannot read the constant {quote(tensor.name)} from {quote(_where(tensor).get('location', ''))}: "
        f"{shorten(str(reason))}; keep the files of an export in one folder"
    )


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)
    except ImageError as error:
        raise NetworkError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NetworkError(f"there is no ONNX file {path} ({reason}); give the exported file") from error


def quote(name: str | bytes) -> str:
    """Return a name in the file, quoted for messages; names that are not UTF-8 are bytes."""
    return shorten(repr(name))


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


Shape = tuple[int, ...]
BATCH: Final = 2  # the number of images for which sizes are found; two tell the batch axis from an axis of length one
MAX_ELEMENTS: Final = 1 << 28  # maximum number of elements of a tensor for a batch of two images
MAX_FOLDED: Final = 1 << 10  # maximum number of integers in a tensor that determines sizes
_ON_SIZES: Final = (
    "Add Cast Concat Constant ConstantOfShape Div Gather Mul Range Reshape Slice Squeeze Sub Transpose Unsqueeze"
)
_FOLDED: Final = frozenset(_ON_SIZES.split())  # computed, to know the shapes that depend on them
_MAX_BOUND: Final = 1 << 61  # of a range: ``onnx`` and NumPy miscount its length when numbers overflow
_FLOAT, _INT32, _INT64 = 1, 6, 7
_INTEGERS: Final = (_INT32, _INT64)


def sizes_of(model: ModelProto, origin: str) -> dict[str, tuple[int, Shape]]:
    """Return the element type and shape of the input, whose size is known, and each computed tensor, for two images."""
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
                    f"{origin}: the size of {quote(name)} ({node.op_type}) is not known before it is computed; export "
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
        if len(shape) > MAX_AXES or math.prod(shape) > MAX_ELEMENTS:
            raise NetworkError(
                f"{self.origin}: tensor {quote(name)} has the shape {shorten(str(shape))}, expected at most "
                f"{MAX_ELEMENTS} elements for {BATCH} images and {MAX_AXES} axes; use smaller images or another network"
            )
        self.sizes[name] = dtype, shape

    def infer(self, node: NodeProto) -> dict[str, tuple[int, Shape | None]]:
        """Return each output's type and shape, or None; few numbers are shown, because each could become an axis."""
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
                raise NetworkError(f"{self.origin}: nothing gives {quote(name)}, which {node.op_type} reads")
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
        # The scale factors of images are constant floats.
        is_of_sizes = dtype in _INTEGERS or (dtype == _FLOAT and node.op_type == "Constant")
        if node.op_type not in _FOLDED or not _is_few(shape) or not is_of_sizes:
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


def _size(tensor_type: Any) -> tuple[int, Shape | None]:
    """Return the element type and shape of an inferred type; None if the shape is not fully known."""
    sides = tuple(axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor_type.shape.dim)
    return tensor_type.elem_type, sides if tensor_type.HasField("shape") and min(sides, default=0) >= 0 else None
