"""Read an untrusted ONNX model, and refuse it if it could do more than compute a network.

A model passes if its operators are standard ones, without random numbers, subgraphs, functions, sequences, texts or
sizes that depend on values; if all its constants are in the file or in a file beside it; and if every tensor has a
bounded size that is known beforehand (:mod:`.sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from psc_core.errors import ImageError, NetworkError, needs, shortened
from psc_core.images.files import read_file
from psc_core.protobuf import LENGTH, fields

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

MAX_FILE_BYTES: Final = (1 << 31) - 1
"""Maximum size of a model in bytes, the limit of the format."""

MAX_NODES: Final = 1 << 16
"""Maximum number of operations."""

MAX_FIELDS: Final = 1 << 20
"""Maximum number of fields in the file at all levels; a parsed field takes a hundred bytes and more."""

MAX_DEPTH: Final = 32
"""Maximum nesting of messages; a model without graphs inside operations has seven levels."""

MIN_OPSET: Final = 7
"""The oldest supported version of the operators."""

MAX_AXES: Final = 32
"""Maximum number of axes of a tensor; without a limit a graph could double the number again and again."""

_NOT_REPEATABLE: Final = "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
_SIZED_BY_VALUES: Final = "Compress NonMaxSuppression NonZero Unique"
_NOT_OF_TENSORS: Final = (
    "ConcatFromSequence ImageDecoder Optional OptionalGetElement OptionalHasElement RegexFullMatch SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence "
    "StringConcat StringNormalizer StringSplit TfIdfVectorizer"
)
_REFUSED: Final = frozenset(f"{_NOT_REPEATABLE} {_SIZED_BY_VALUES} {_NOT_OF_TENSORS}".split())


def read_onnx(path: Path) -> ModelProto:
    """Read an ONNX file that the user names, with the constants in the files beside it.

    Raises:
        NetworkError: If the file cannot be read, or :func:`check_model` refuses it.
    """
    model = parse_model(_read(path), str(path))
    folder = path.parent.resolve()
    for tensor in _tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            _fill(tensor, folder, str(path))
    check_model(model, str(path))
    return model


def files_of_model(path: Path) -> tuple[Path, ...]:
    """Return the files of a model: the ONNX file and the files beside it that hold constants.

    Raises:
        NetworkError: If the file is not an ONNX file, or a constant lies in a file elsewhere.
    """
    model, folder = parse_model(_read(path), str(path)), path.parent.resolve()
    outside = [tensor for tensor in _tensors(model) if tensor.data_location == tensor.EXTERNAL]
    return (path, *sorted({_place(tensor, folder, str(path)) for tensor in outside}))


def parse_model(data: bytes, origin: str) -> ModelProto:
    """Parse a serialized model; ``origin`` names it in messages.

    Raises:
        NetworkError: If it is not a model, has too many fields, or onnx is not installed.
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
    """Yield once for every field of a serialized message, at all levels, before any field becomes an object."""
    if depth > MAX_DEPTH:
        raise NetworkError(f"{origin}: expected at most {MAX_DEPTH} messages inside each other; export it again")
    for number, wire_type, content in fields(body):
        yield
        field = message.fields_by_number.get(number)
        if field is not None and field.message_type is not None and wire_type == LENGTH:
            yield from _fields(content, field.message_type, origin, depth + 1)


def check_model(model: ModelProto, origin: str) -> None:
    """Refuse a model with anything but ONNX's standard operators on tensors and constants inside the file.

    Raises:
        NetworkError: If it is refused; the message names the operation or the tensor.
    """
    import onnx

    foreign = {node.domain for node in model.graph.node} - {"", "ai.onnx"} or {each.name for each in model.functions}
    if foreign:
        names = ", ".join(shortened(name) for name in sorted(map(str, foreign))[:3])  # bytes if not UTF-8
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
                f"{origin}: the operator {quoted(node.op_type)} is not supported; export the network without it"
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
        raise NetworkError(f"{origin} is not a valid ONNX model: {first_line(error)}; export it again") from error


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield all constants of a model."""
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
            f"{origin}: the constant {quoted(tensor.name)} lies in another file; store it inside the model"
        )
    if isinstance(tensor.name, bytes):
        raise NetworkError(f"{origin} has a tensor whose name is not in UTF-8; export it again")
    is_numeric = tensor.data_type in helper.get_all_tensor_dtypes() and tensor.data_type != tensor.STRING
    if not is_numeric or min(tensor.dims, default=0) < 0:
        raise NetworkError(
            f"{origin}: the constant {quoted(tensor.name)} is not an array of numbers; export the model again"
        )
    if len(tensor.dims) > MAX_AXES:
        raise NetworkError(
            f"{origin}: the constant {quoted(tensor.name)} has {len(tensor.dims)} axes, expected at most {MAX_AXES}; "
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
            f"{origin}: the constant {quoted(tensor.name)} claims the shape {tuple(tensor.dims)}, its data has another "
            "size; export the model again"
        )


def _bits(data_type: int) -> int:
    """Return the number of bits of a number of this type."""
    from onnx import TensorProto, helper

    if data_type in (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1):
        return 4
    return 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def _place(tensor: TensorProto, folder: Path, origin: str) -> Path:
    """Return the file in the model's folder that holds a constant."""
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
        f"{origin}: cannot read the constant {quoted(tensor.name)} from {quoted(_where(tensor).get('location', ''))}: "
        f"{shortened(str(reason))}; keep the files of an export in one folder"
    )


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)
    except ImageError as error:
        raise NetworkError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NetworkError(f"there is no ONNX file {path} ({reason}); give the exported file") from error


def quoted(name: str | bytes) -> str:
    """Return a name in the file, quoted for messages; names that are not UTF-8 are bytes."""
    return shortened(repr(name))


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, for messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
