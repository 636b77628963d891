"""Open Inference Protocol v2: request and response bodies ↔ tensors, JSON or with the binary extension.

::

    body ─ parse_request ─▶ InferRequest ─ images_of ─▶ uint8 array or encoded files
    arrays ─ build_response ─▶ body, length of its JSON header

A body is one JSON object; with the binary tensor extension the header ``Inference-Header-Content-Length``
gives the object's length, and the tensors that name a ``binary_data_size`` follow it, in order:
little-endian, row-major, ``BYTES`` elements each behind a 4-byte length.  In JSON, data may be flat or
nested; elements of ``BYTES`` are base64 text, for a JSON string cannot hold the bytes of an image.

Inputs, exactly one in a request: ``images`` (``UINT8`` NHWC or NCHW, of the network's own size) or
``encoded_images`` (``BYTES``, image files).  No HTTP and no torch in here.
"""

from __future__ import annotations

import binascii
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson

from app.errors import MalformedRequest, TooManyImages

RAW_INPUT: Final = "images"
ENCODED_INPUT: Final = "encoded_images"
LAYOUTS: Final = ("NHWC", "NCHW")
_LENGTH: Final = 4
_DTYPES: Final = {"FP32": "<f4", "INT64": "<i8", "BOOL": "|b1"}
_UNSUPPORTED_PARAMETERS: Final = ("shared_memory_region", "classification")

Json = Mapping[str, Any]


@dataclass(frozen=True)
class InputTensor:
    """One input as it was sent: JSON ``data``, or ``binary`` bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Json
    data: Any = None
    binary: memoryview | None = None


@dataclass(frozen=True)
class InferRequest:
    """A parsed request.

    Attributes:
        tensor: Its one input.
        outputs: Wanted outputs, name to whether it is wanted as binary data; ``None`` means all.
        binary_output: How outputs that do not say are wanted.
        id: To be given back.
        parameters: Of the request.
    """

    tensor: InputTensor
    outputs: Mapping[str, bool] | None
    binary_output: bool
    id: str | None
    parameters: Json = field(default_factory=dict)


Datatype = Literal["FP32", "INT64", "BOOL", "BYTES"]


@dataclass(frozen=True)
class OutputTensor:
    """One output: an array, or for ``BYTES`` a sequence of texts."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    values: npt.NDArray[Any] | Sequence[str]


def parse_request(body: bytes, header_length: str | None, output_names: Sequence[str]) -> InferRequest:
    """Parse a request body.

    Args:
        body: The whole body.
        header_length: Value of ``Inference-Header-Content-Length``, if sent.
        output_names: The outputs that exist.

    Raises:
        MalformedRequest: It does not follow the protocol.
    """
    length = _header_length(header_length, len(body))
    document = _load_json(memoryview(body)[:length])
    parameters = _object(document, "parameters")
    tensors = _tensors(document, memoryview(body)[length:])
    if len(tensors) != 1 or tensors[0].name not in (RAW_INPUT, ENCODED_INPUT):
        names = reprlib.repr([tensor.name for tensor in tensors])
        raise MalformedRequest(
            f"expected exactly one input, {RAW_INPUT!r} or {ENCODED_INPUT!r}, got {names}; see the metadata"
        )
    identifier = document.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise MalformedRequest("expected 'id' to be a string; correct the request")
    binary_output = _flag(parameters, "binary_data_output", default=False)
    outputs = _wanted(document, output_names, binary_output)
    return InferRequest(tensors[0], outputs, binary_output, identifier, parameters)


def images_of(
    tensor: InputTensor, shape: tuple[int, int, int], *, max_images: int
) -> npt.NDArray[np.uint8] | list[bytes]:
    """The images of an input.

    Args:
        tensor: ``images`` or ``encoded_images``.
        shape: (channels, height, width) of the network's input.
        max_images: Most images in a request.

    Returns:
        ``uint8`` of shape (n, channels, height, width), or n encoded files; n ≥ 1.

    Raises:
        MalformedRequest: Datatype, shape or data are not what the metadata says.
        TooManyImages: More than ``max_images``.
    """
    expected = "UINT8" if tensor.name == RAW_INPUT else "BYTES"
    if tensor.datatype != expected:
        got = reprlib.repr(tensor.datatype)
        raise MalformedRequest(f"input {tensor.name!r}: expected datatype {expected}, got {got}; see the metadata")
    if expected == "UINT8":
        layout = _layout(tensor, shape)
    elif len(tensor.shape) != 1 and tensor.shape[1:] != (1,):
        raise _bad_shape(tensor, "[n] or [n, 1]")
    count = tensor.shape[0]
    if count < 1:
        raise MalformedRequest(f"input {tensor.name!r}: expected at least one image, got none; add an image")
    if count > max_images:
        raise TooManyImages(f"expected at most {max_images} images, got {count}; split the request")
    if expected == "BYTES":
        return _files(tensor, count)
    pixels = _pixels(tensor).reshape(tensor.shape)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2) if layout == "NHWC" else pixels)


def build_response(
    head: Json, tensors: Sequence[OutputTensor], wanted_binary: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON part if binary data follows it.

    Args:
        head: Members of the response other than ``outputs``.
        tensors: Outputs, in the order in which they are given.
        wanted_binary: Name to whether it goes as binary data.
    """
    outputs: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        if wanted_binary[tensor.name]:
            buffers.append(_to_binary(tensor))
            output["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            values = tensor.values
            output["data"] = np.ascontiguousarray(values).ravel() if isinstance(values, np.ndarray) else values
        outputs.append(output)
    document = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((document, *buffers)), len(document)) if buffers else (document, None)


def _to_binary(tensor: OutputTensor) -> bytes:
    if isinstance(tensor.values, np.ndarray):
        return np.ascontiguousarray(tensor.values, dtype=_DTYPES[tensor.datatype]).tobytes()
    encoded = [value.encode() for value in tensor.values]
    return b"".join(len(value).to_bytes(_LENGTH, "little") + value for value in encoded)


def _header_length(value: str | None, body_length: int) -> int:
    if value is None:
        return body_length
    if not (value.isascii() and value.isdigit() and len(value) < 16 and 0 < int(value) <= body_length):
        raise MalformedRequest(
            f"expected Inference-Header-Content-Length from 1 to the body's {body_length} bytes, got "
            f"{value[:32]!r}; give the length of the JSON object"
        )
    return int(value)


def _load_json(text: memoryview) -> dict[str, Any]:
    try:
        document: Any = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"expected JSON, {error.msg} at byte {error.pos}; correct the body") from error
    if not isinstance(document, dict):
        raise MalformedRequest(f"expected a JSON object, got {type(document).__name__}; correct the body")
    return document


def _tensors(document: Json, rest: memoryview) -> list[InputTensor]:
    tensors = []
    for entry in _objects(document, "inputs"):
        name, datatype, shape = entry.get("name"), entry.get("datatype"), entry.get("shape")
        shown = reprlib.repr(name)
        if not isinstance(name, str) or not isinstance(datatype, str) or not isinstance(shape, list):
            raise MalformedRequest("expected every input to have name, datatype and shape; correct it")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise MalformedRequest(f"input {shown}: expected a shape of whole numbers ≥ 0, got {reprlib.repr(shape)}")
        parameters = _object(entry, "parameters")
        _refuse_unsupported(shown, parameters)
        size = parameters.get("binary_data_size")
        if (size is None) == ("data" not in entry):
            raise MalformedRequest(f"input {shown}: expected either data or binary_data_size; give one")
        binary = None
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(rest):
                raise MalformedRequest(
                    f"input {shown}: expected binary_data_size of at most the {len(rest)} bytes that "
                    f"follow, got {reprlib.repr(size)}; correct the size or the body"
                )
            binary, rest = rest[:size], rest[size:]
        tensors.append(InputTensor(name, datatype, tuple(shape), parameters, entry.get("data"), binary))
    if len(rest):
        raise MalformedRequest(
            f"expected binary data of the sizes given, got {len(rest)} bytes more; check binary_data_size "
            "and Inference-Header-Content-Length"
        )
    return tensors


def _wanted(document: Json, output_names: Sequence[str], default: bool) -> dict[str, bool] | None:
    if not document.get("outputs"):
        return None
    wanted: dict[str, bool] = {}
    for entry in _objects(document, "outputs"):
        name = entry.get("name")
        if not isinstance(name, str) or name not in output_names:
            raise MalformedRequest(
                f"expected outputs among {', '.join(output_names)}, got {reprlib.repr(name)}; correct it"
            )
        if name in wanted:
            raise MalformedRequest(f"expected each output once, got {name!r} again; leave one out")
        parameters = _object(entry, "parameters")
        _refuse_unsupported(repr(name), parameters)
        wanted[name] = _flag(parameters, "binary_data", default=default)
    return wanted


def _layout(tensor: InputTensor, shape: tuple[int, int, int]) -> str:
    """The layout the parameter names, else the one the shape fits; NHWC where both fit."""
    channels, height, width = shape
    sizes = {"NHWC": (height, width, channels), "NCHW": (channels, height, width)}
    named = tensor.parameters.get("layout")
    if named is not None and named not in LAYOUTS:
        raise MalformedRequest(
            f"input {tensor.name!r}: expected layout NHWC or NCHW, got {reprlib.repr(named)}; correct it"
        )
    for layout in LAYOUTS if named is None else (named,):
        if len(tensor.shape) == 4 and tensor.shape[1:] == sizes[layout]:
            return layout
    choices = " or ".join(
        f"[n, {', '.join(map(str, sizes[layout]))}] ({layout})" for layout in (LAYOUTS if named is None else (named,))
    )
    raise _bad_shape(tensor, f"{choices}; images of other sizes go as {ENCODED_INPUT!r}")


def _pixels(tensor: InputTensor) -> npt.NDArray[np.uint8]:
    size = math.prod(tensor.shape)
    if tensor.binary is not None:
        if len(tensor.binary) != size:
            raise _bad_size(tensor, size, len(tensor.binary), "bytes")
        return np.frombuffer(tensor.binary, np.uint8)
    try:
        values = np.asarray(tensor.data, dtype=object)  # Of one type, a long text would make all of them as long.
    except ValueError as error:
        raise MalformedRequest(f"input {tensor.name!r}: expected rows of equal length; correct data") from error
    types = set(map(type, values.ravel().tolist()))
    if list in types:
        raise MalformedRequest(f"input {tensor.name!r}: expected rows of equal length; correct data")
    if values.size != size:
        raise _bad_size(tensor, size, values.size, "values")
    if types != {int} or values.min() < 0 or values.max() > 255:
        raise MalformedRequest(f"input {tensor.name!r}: expected whole numbers from 0 to 255; correct data")
    return values.astype(np.uint8)


def _files(tensor: InputTensor, count: int) -> list[bytes]:
    if tensor.binary is None:
        return _files_from_json(tensor, count)
    files: list[bytes] = []
    rest = tensor.binary
    while len(rest):
        size = int.from_bytes(rest[:_LENGTH], "little")
        if len(rest) < _LENGTH + size or len(files) == count:
            raise _bad_size(tensor, count, len(files) + 1, "elements behind 4-byte lengths")
        files.append(bytes(rest[_LENGTH : _LENGTH + size]))
        rest = rest[_LENGTH + size :]
    if len(files) != count:
        raise _bad_size(tensor, count, len(files), "elements")
    return files


def _files_from_json(tensor: InputTensor, count: int) -> list[bytes]:
    data = tensor.data
    if isinstance(data, list) and len(tensor.shape) == 2:
        data = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in data]
    if not isinstance(data, list) or len(data) != count:
        got = len(data) if isinstance(data, list) else 0
        raise _bad_size(tensor, count, got, "elements")
    try:
        return [binascii.a2b_base64(value, strict_mode=True) for value in data]
    except (binascii.Error, TypeError, ValueError) as error:
        raise MalformedRequest(
            f"input {tensor.name!r}: expected base64 text with padding and no line breaks ({error}); encode "
            "the files so, or send binary data"
        ) from error


def _object(document: Json, name: str) -> dict[str, Any]:
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedRequest(f"expected {name!r} to be an object, got {type(value).__name__}; correct it")
    return value


def _objects(document: Json, name: str) -> list[dict[str, Any]]:
    value = document.get(name)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise MalformedRequest(f"expected {name!r} to be a list of objects; correct the request")
    return value


def _flag(parameters: Json, name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise MalformedRequest(
            f"expected parameter {name!r} to be true or false, got {reprlib.repr(value)}; correct it"
        )
    return value


def _refuse_unsupported(name: str, parameters: Json) -> None:
    for parameter in _UNSUPPORTED_PARAMETERS:
        if parameter in parameters:
            raise MalformedRequest(f"{name}: parameter {parameter!r} is not supported; leave it out")


def _bad_shape(tensor: InputTensor, expected: str) -> MalformedRequest:
    return MalformedRequest(f"input {tensor.name!r}: expected shape {expected}; got {reprlib.repr(list(tensor.shape))}")


def _bad_size(tensor: InputTensor, expected: int, got: int, unit: str) -> MalformedRequest:
    return MalformedRequest(
        f"input {tensor.name!r}: expected {expected} {unit} for shape {list(tensor.shape)}, got {got}; "
        "correct shape or data"
    )
