"""Read an ONNX model that anybody may have written, and refuse what could do more than compute a network.

A model passes if its operators are ONNX's own, without random numbers, subgraphs, functions, sequences, texts or sizes
that depend on values; if all its constants are in the file, or in a file beside it; and if every tensor for a batch of
two images has a known size within :data:`MAX_ELEMENTS`.  Nothing is computed to find that out but the integers that
sizes are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from psc_core.errors import ImageError, NetworkError, needs
from psc_core.images.files import read_file
from psc_core.protobuf import LENGTH, fields

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

Shape = tuple[int, ...]
Numbers = npt.NDArray[Any]

BATCH: Final = 2
"""Images for which sizes are found out; two tell the axis of the batch from an axis of length one."""

MAX_BYTES: Final = (1 << 31) - 1
"""Maximum size of a model, the limit of its format."""

MAX_NODES: Final = 1 << 16
"""Maximum number of operations."""

MAX_FIELDS: Final = 1 << 20
"""Maximum number of fields in the file, those inside others included; a parsed one takes a hundred bytes and more."""

MAX_DEPTH: Final = 32
"""Maximum number of messages around a field; of a model without graphs inside operations there are seven."""

MAX_ELEMENTS: Final = 1 << 28
"""Maximum number of elements of a tensor for a batch of two images."""

MIN_OPSET: Final = 7
"""Oldest version of the operators."""

MAX_ROUNDS: Final = 32
"""Rounds of looking for sizes that are computed from sizes; exports need one or two."""

_NOT_REPEATABLE: Final = "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
_SIZED_BY_VALUES: Final = "Compress NonMaxSuppression NonZero Unique"
_NOT_OF_TENSORS: Final = (
    "ConcatFromSequence ImageDecoder Optional OptionalGetElement OptionalHasElement RegexFullMatch SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence "
    "StringConcat StringNormalizer StringSplit TfIdfVectorizer"
)
_REFUSED: Final = frozenset(f"{_NOT_REPEATABLE} {_SIZED_BY_VALUES} {_NOT_OF_TENSORS}".split())

_ON_SIZES: Final = (
    "Add Cast Concat Constant ConstantOfShape Div Gather Mul Range Reshape Slice Squeeze Sub Transpose Unsqueeze"
)
_FOLDED: Final = frozenset(_ON_SIZES.split())
"""Operators on sizes that are computed to know what follows from them."""

_MAX_FOLDED: Final = 1 << 10
"""Maximum number of integers that such an operation takes or gives."""


def read_model(path: Path) -> ModelProto:
    """Read an ONNX file of the user's, with the constants that lie beside it.

    Raises:
        NetworkError: The file cannot be read, or :func:`check_model` refuses it.
    """
    model = parse_model(_read(path), str(path))
    folder = path.parent.resolve()
    for tensor in _tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            _fill(tensor, folder, str(path))
    check_model(model, str(path))
    return model


def files_of_model(path: Path) -> tuple[Path, ...]:
    """Return the files of a model: the ONNX file, and those beside it that hold its constants.

    Raises:
        NetworkError: The file is no ONNX file, or a constant lies in a file that is not beside it.
    """
    model, folder = parse_model(_read(path), str(path)), path.parent.resolve()
    outside = [tensor for tensor in _tensors(model) if tensor.data_location == tensor.EXTERNAL]
    return (path, *sorted({_place(tensor, folder, str(path)) for tensor in outside}))


def parse_model(data: bytes, origin: str) -> ModelProto:
    """Parse a serialized model; ``origin`` is for messages.

    Raises:
        NetworkError: It is none, has too many fields, or the package that parses it is not installed.
    """
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
    """Every field of a serialized message, and of those inside it, before any of it becomes an object."""
    if depth > MAX_DEPTH:
        raise NetworkError(f"{origin}: expected at most {MAX_DEPTH} messages inside each other; export it again")
    for number, wire_type, content in fields(body):
        yield
        field = message.fields_by_number.get(number)
        if field is not None and field.message_type is not None and wire_type == LENGTH:
            yield from _fields(content, field.message_type, origin, depth + 1)


def check_model(model: ModelProto, origin: str) -> None:
    """Refuse a model with anything but ONNX's own operators on tensors, all of its constants inside.

    Raises:
        NetworkError: The message names the operation or the tensor.
    """
    import onnx

    foreign = {node.domain for node in model.graph.node} - {"", "ai.onnx"} or {each.name for each in model.functions}
    if foreign:
        names = ", ".join(sorted(map(str, foreign))[:3])  # bytes where they are no UTF-8
        raise NetworkError(f"{origin} uses operators of {names}, expected ONNX's own; export it without them")
    if max((imported.version for imported in model.opset_import), default=0) < MIN_OPSET:
        raise NetworkError(f"{origin}: expected version {MIN_OPSET} of ONNX's operators or newer; export it again")
    if len(model.graph.node) > MAX_NODES:
        raise NetworkError(f"{origin}: expected at most {MAX_NODES} operations, got {len(model.graph.node)}")
    false = {tensor.name for tensor in model.graph.initializer if tensor.raw_data in (b"", b"\0") and not tensor.dims}
    for node in model.graph.node:
        is_known = isinstance(node.op_type, str) and onnx.defs.has(node.op_type)  # bytes if it is no UTF-8
        if node.op_type in _REFUSED or not is_known:
            raise NetworkError(
                f"{origin}: the operator {node.op_type!r} is not supported; export the network without it"
            )
        if any(attribute.HasField("sparse_tensor") or attribute.sparse_tensors for attribute in node.attribute):
            raise NetworkError(f"{origin} has sparse constants, which are not supported; store them dense")
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] not in false:
            raise NetworkError(f"{origin} has a dropout that may be active; export the network in evaluation mode")
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise NetworkError(
                f"{origin}: the operator {node.op_type} holds a graph of its own, which is not supported; export the "
                "network without control flow"
            )
    if model.graph.sparse_initializer:
        raise NetworkError(f"{origin} has sparse constants, which are not supported; store them dense")
    for tensor in _tensors(model):
        _check_tensor(tensor, origin)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise NetworkError(f"{origin} is not a valid ONNX model: {_first_line(error)}; export it again") from error


def sizes_of(model: ModelProto, origin: str) -> dict[str, tuple[int, Shape]]:
    """Return element type and shape of each tensor that is computed from a batch of two images, and of the input.

    The model has one input, (batch, …) with known sizes but for the batch.

    Raises:
        NetworkError: A size is not known before computing, or above :data:`MAX_ELEMENTS`.
    """
    import onnx

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.value_info[:]
    shape = probe.graph.input[0].type.tensor_type.shape
    if not shape.dim[0].HasField("dim_value"):
        shape.dim[0].dim_value = BATCH
    for output in probe.graph.output:
        output.type.tensor_type.ClearField("shape")
    values: dict[str, Numbers | None] = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type in (tensor.INT64, tensor.INT32) and math.prod(tensor.dims) <= _MAX_FOLDED
    }
    for _ in range(MAX_ROUNDS):
        found = _infer(probe, origin)
        unknown = [node for node in probe.graph.node if any(name and found.get(name) is None for name in node.output)]
        for name, known in found.items():
            if known is not None and math.prod(known[1]) > MAX_ELEMENTS:
                raise NetworkError(
                    f"{origin}: tensor {name!r} has the shape {known[1]}, expected at most {MAX_ELEMENTS} elements for "
                    f"{BATCH} images; use smaller images or another network"
                )
        if not unknown:
            return {name: known for name, known in found.items() if known is not None}
        if not _fold(probe, found, values, origin):
            break
    raise NetworkError(
        f"{origin}: the size of {unknown[0].output[0]!r} ({unknown[0].op_type}) is not known before it is computed; "
        "export the network with fixed image sizes"
    )


def _infer(model: ModelProto, origin: str) -> dict[str, tuple[int, Shape] | None]:
    """Infer type and shape of all tensors; None where the shape is not known."""
    import onnx

    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=False)
    except Exception as error:  # The library raises its own types, and RuntimeError for shapes that do not fit.
        raise NetworkError(f"{origin}: its shapes do not fit together: {_first_line(error)}") from error
    found: dict[str, tuple[int, Shape] | None] = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        kind = value.type.tensor_type
        sizes = tuple(axis.dim_value if axis.HasField("dim_value") else -1 for axis in kind.shape.dim)
        is_known = kind.HasField("shape") and min(sizes, default=0) >= 0
        found[value.name] = (kind.elem_type, sizes) if is_known else None
    return found


def _fold(
    model: ModelProto, found: Mapping[str, tuple[int, Shape] | None], values: dict[str, Numbers | None], origin: str
) -> bool:
    """Replace operations on a few integers by their result; True if some were.

    Inference could propagate them too, but without a limit on how many there are.

    Args:
        model: Changed in place.
        found: Type and shape of its tensors, as far as they are known.
        values: Few integers by the tensor's name, and None for what was computed and is something else; both grow.
        origin: For messages.
    """
    from onnx import numpy_helper

    opsets = {imported.domain: imported.version for imported in model.opset_import}
    done: dict[str, Numbers] = {}
    others: list[NodeProto] = []
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        known = found.get(node.input[0]) if node.input else None
        given = {each: values.get(each) for each in node.input if each}
        if not name:
            pass
        elif node.op_type == "Shape" and known is not None:
            bounds = {attribute.name: attribute.i for attribute in node.attribute}
            values[name] = np.asarray(known[1][bounds.get("start", 0) : bounds.get("end")], np.int64)
        elif node.op_type in _FOLDED and name not in values and all(each is not None for each in given.values()):
            values[name] = _computed(node, given, opsets, origin)
        result = values.get(name) if name else None
        if result is None:
            others.append(node)
        else:
            done[name] = result
    del model.graph.node[:]
    model.graph.node.extend(others)
    model.graph.initializer.extend(numpy_helper.from_array(result, name) for name, result in done.items())
    return bool(done)


def _computed(
    node: NodeProto, given: Mapping[str, Numbers | None], opsets: dict[str, int], origin: str
) -> Numbers | None:
    """The result of an operation on integers, if it is a few integers."""
    from onnx.reference import ReferenceEvaluator

    if _length(node.op_type, [given[name] for name in node.input if name]) > _MAX_FOLDED:
        return None
    try:
        outputs: Any = ReferenceEvaluator(node, opsets=opsets).run(None, dict(given))
    except Exception as error:  # Of NumPy, or of the library, for what does not fit together.
        raise NetworkError(f"{origin}: {node.op_type} of sizes cannot be computed: {error}") from error
    result = np.asarray(outputs[0])
    return result if result.dtype in (np.int64, np.int32) and result.size <= _MAX_FOLDED else None


def _length(operator: str, given: list[Any]) -> int:
    """Count the numbers that an operator gives, or those that it takes where these are at least as many."""
    if operator == "Range" and [each.size for each in given] == [1, 1, 1] and given[2].item() != 0:
        first, limit, step = (each.item() for each in given)
        return int(-((first - limit) // step))
    if operator == "ConstantOfShape":
        return math.prod(given[0].ravel().tolist())
    if operator in ("Add", "Div", "Gather", "Mul", "Sub"):  # Each number of one may meet each of the other.
        return math.prod(each.size for each in given)
    return sum(each.size for each in given)


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All constants of a model."""
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_tensor(tensor: TensorProto, origin: str) -> None:
    """Refuse a constant that is not whole inside the model, before its size is allocated."""
    from onnx import helper

    if tensor.data_location == tensor.EXTERNAL or tensor.external_data:
        raise NetworkError(f"{origin}: the constant {tensor.name!r} lies in another file; store it inside the model")
    is_numeric = tensor.data_type in helper.get_all_tensor_dtypes() and tensor.data_type != tensor.STRING
    if not is_numeric or min(tensor.dims, default=0) < 0:
        raise NetworkError(f"{origin}: the constant {tensor.name!r} is no array of numbers; export the model again")
    size = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        expected, got = (size * _bits(tensor.data_type) + 7) // 8, len(tensor.raw_data)
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        per_number = 2 if tensor.data_type in (tensor.COMPLEX64, tensor.COMPLEX128) else 1
        expected, got = size * per_number, len(getattr(tensor, field))
        if _bits(tensor.data_type) < 8:  # Several are packed in one number.
            expected = (size * _bits(tensor.data_type) + 7) // 8
    if expected != got:
        raise NetworkError(
            f"{origin}: the constant {tensor.name!r} claims the shape {tuple(tensor.dims)}, its data has another size; "
            "export the model again"
        )


def _bits(data_type: int) -> int:
    """Bits of a number of this type."""
    from onnx import TensorProto, helper

    if data_type in (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1):
        return 4
    return 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def _place(tensor: TensorProto, folder: Path, origin: str) -> Path:
    """Return the file in the model's folder in which a constant lies."""
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
    """Read a constant that lies in a file of its own, in the model's folder."""
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
        f"{origin}: cannot read the constant {tensor.name!r} from {_where(tensor).get('location', '')!r}: {reason}; "
        "keep the files of an export in one folder"
    )


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_BYTES)
    except ImageError as error:
        raise NetworkError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NetworkError(f"there is no ONNX file {path} ({reason}); give what the network was exported to") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
