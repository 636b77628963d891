"""Convert between tensors and the bodies of the Open Inference Protocol v2, JSON or with the binary extension.

::

    body ─ parse_request ─▶ InferRequest ─ images_of ─▶ uint8 array or encoded files
    arrays ─ build_response ─▶ body, length of its JSON header

A body is one JSON object.  With the binary tensor extension, the header ``Inference-Header-Content-Length`` gives the
object's length, and the data of the tensors that have a ``binary_data_size`` follow it in order: little-endian,
row-major, each ``BYTES`` element after its 4-byte length.  In JSON, data are flat or nested as ``shape`` says; elements
of ``BYTES`` are base64 text, because a JSON string cannot hold the bytes of an image.

A request has exactly one input: ``images`` (``UINT8``, NHWC or NCHW, of the network's input size) or
``encoded_images`` (``BYTES``, image files).  gRPC requests pass through here too.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError

from app.errors import MalformedRequest, TooManyImages
from app.http.json_body import load_json
from app.http.uploads import decode_base64
from app.http.v2.schemas import HEADER, InferRequest, InputTensor
from app.tasks.base import Datatype
from psc_core.errors import fault

_LENGTH: Final = 4
_DTYPES: Final = {"FP32": "<f4", "INT64": "<i8", "UINT8": "|u1", "BOOL": "|b1"}


@dataclass(frozen=True)
class OutputTensor:
    """One output: an array, or for ``BYTES`` a sequence of texts."""

    name: str
    datatype: Datatype
    shape: Sequence[int]
    values: npt.NDArray[Any] | Sequence[str]


def parse_request(body: bytes, header_length: str | None) -> tuple[InferRequest, memoryview | None]:
    """Parse a request body.

    Args:
        body: The whole body.
        header_length: The value of ``Inference-Header-Content-Length``, if sent.

    Returns:
        The request, and the binary data of its input if it has any.

    Raises:
        MalformedRequest: If the body does not follow the protocol.
    """
    length = _header_length(header_length, len(body))
    text, binary = body if length == len(body) else body[:length], memoryview(body)[length:]
    request = request_of(load_json(text))
    size = request.inputs[0].parameters.binary_data_size
    if len(binary) != (size or 0):
        raise MalformedRequest(
            f"expected {size or 0} bytes of binary data, got {len(binary)}; check binary_data_size and {HEADER}"
        )
    return request, None if size is None else binary


def request_of(document: Any) -> InferRequest:
    """Return the request in a JSON document.

    Raises:
        MalformedRequest: If the document does not follow the protocol.
    """
    try:
        return InferRequest.model_validate(document)
    except ValidationError as error:
        raise MalformedRequest(f"request: {fault(error.errors(include_input=False, include_url=False)[0])}") from error


def images_of(
    tensor: InputTensor, binary: memoryview | None, shape: tuple[int, int, int], *, max_images: int
) -> npt.NDArray[np.uint8] | list[bytes]:
    """Return the images of an input.

    Args:
        tensor: The input, ``images`` or ``encoded_images``.
        binary: The input's binary data; None if its data are in the JSON.
        shape: (channels, height, width) of the network's input.
        max_images: The maximum number of images in a request.

    Returns:
        ``uint8`` of shape (n, channels, height, width), or n encoded files; n ≥ 1.

    Raises:
        MalformedRequest: If the data do not fit the shape, or the shape does not fit the network.
        TooManyImages: If there are more than ``max_images``.
    """
    if tensor.name == "images":
        layout = _layout(tensor, shape)
    elif len(tensor.shape) != 1 and tensor.shape[1:] != [1]:
        raise _bad_shape(tensor, "[n] or [n, 1]")
    count = tensor.shape[0]
    if count < 1:
        raise MalformedRequest(f"input {tensor.name!r} has no image; add one")
    if count > max_images:
        raise TooManyImages(f"expected at most {max_images} images, got {count}; split the request")
    if tensor.name == "encoded_images":
        return _files_from_json(tensor, count) if binary is None else _files(tensor, binary, count)
    pixels = _pixels(tensor, binary).reshape(tensor.shape)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2) if layout == "NHWC" else pixels)


def build_response(
    head: Mapping[str, Any], tensors: Sequence[OutputTensor], wanted_binary: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON part if binary data follows it.

    Args:
        head: The members of the response other than ``outputs``.
        tensors: The outputs, in the order of the response.
        wanted_binary: Maps the name of an output to whether it is returned as binary data.
    """
    outputs: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        if wanted_binary[tensor.name]:
            buffers.append(to_binary(tensor))
            output["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            values = tensor.values
            output["data"] = np.ascontiguousarray(values).ravel() if isinstance(values, np.ndarray) else values
        outputs.append(output)
    document = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((document, *buffers)), len(document)) if buffers else (document, None)


def to_binary(tensor: OutputTensor) -> bytes:
    """Return the values as bytes, in the form of the binary tensor extension and of gRPC's raw contents."""
    if isinstance(tensor.values, np.ndarray):
        return np.ascontiguousarray(tensor.values, dtype=_DTYPES[tensor.datatype]).tobytes()
    encoded = [value.encode() for value in tensor.values]
    return b"".join(len(value).to_bytes(_LENGTH, "little") + value for value in encoded)


def _header_length(value: str | None, body_length: int) -> int:
    if value is None:
        return body_length
    if not (value.isascii() and value.isdigit() and len(value) < 16 and 0 < int(value) <= body_length):
        raise MalformedRequest(
            f"expected {HEADER} from 1 to the body's {body_length} bytes, got "
            f"{value[:32]!r}; send the length of the JSON object"
        )
    return int(value)


def _layout(tensor: InputTensor, shape: tuple[int, int, int]) -> str:
    """Return the layout that the parameter names, else the one that the shape fits; NHWC if both fit."""
    channels, height, width = shape
    sizes = {"NHWC": [height, width, channels], "NCHW": [channels, height, width]}
    named = tensor.parameters.layout
    for layout in [named] if named else sizes:
        if len(tensor.shape) == 4 and tensor.shape[1:] == sizes[layout]:
            return layout
    choices = " or ".join(
        f"[n, {', '.join(map(str, sizes[layout]))}] ({layout})" for layout in ([named] if named else sizes)
    )
    raise _bad_shape(tensor, f"{choices}; send images of other sizes as 'encoded_images'")


def _pixels(tensor: InputTensor, binary: memoryview | None) -> npt.NDArray[np.uint8]:
    size = math.prod(tensor.shape)
    if binary is not None:
        if len(binary) != size:
            raise _bad_size(tensor, size, len(binary), "bytes")
        return np.frombuffer(binary, np.uint8)
    try:
        # As objects: in an array of strings, every element would take as much memory as the longest.
        values = np.asarray(tensor.data, dtype=object)
    except ValueError as error:
        raise MalformedRequest(f"input {tensor.name!r}: expected rows of equal length; pad or cut them") from error
    types = set(map(type, values.ravel().tolist()))
    if list in types:
        raise MalformedRequest(f"input {tensor.name!r}: expected rows of equal length; pad or cut them")
    if values.size != size:
        raise _bad_size(tensor, size, values.size, "values")
    if values.ndim > 1 and values.shape != tuple(tensor.shape):  # Reshaped, the pixels would be those of another image.
        raise _bad_nesting(tensor, values.shape)
    if types != {int} or values.min() < 0 or values.max() > 255:
        raise MalformedRequest(f"input {tensor.name!r}: expected whole numbers from 0 to 255")
    return values.astype(np.uint8)


def _files(tensor: InputTensor, binary: memoryview, count: int) -> list[bytes]:
    files: list[bytes] = []
    while len(binary):
        size = int.from_bytes(binary[:_LENGTH], "little")
        if len(binary) < _LENGTH + size or len(files) == count:
            raise _bad_size(tensor, count, len(files) + 1, "elements behind 4-byte lengths")
        files.append(bytes(binary[_LENGTH : _LENGTH + size]))
        binary = binary[_LENGTH + size :]
    if len(files) != count:
        raise _bad_size(tensor, count, len(files), "elements")
    return files


def _files_from_json(tensor: InputTensor, count: int) -> list[bytes]:
    data = tensor.data or []
    if len(data) != count:
        raise _bad_size(tensor, count, len(data), "elements")
    if any(isinstance(value, list) for value in data):
        if len(tensor.shape) != 2 or not all(isinstance(value, list) and len(value) == 1 for value in data):
            raise _bad_nesting(tensor)
        data = [value for (value,) in data]
    return [decode_base64(value, f"input {tensor.name!r}") for value in data]


def _bad_shape(tensor: InputTensor, expected: str) -> MalformedRequest:
    return MalformedRequest(f"input {tensor.name!r}: expected shape {expected}; got {reprlib.repr(list(tensor.shape))}")


def _bad_nesting(tensor: InputTensor, got: Sequence[int] = ()) -> MalformedRequest:
    lists = f", got lists of {list(got)}" if got else ""
    return MalformedRequest(
        f"input {tensor.name!r}: expected flat data, or lists nested as its shape {list(tensor.shape)}{lists}; "
        "correct shape or data"
    )


def _bad_size(tensor: InputTensor, expected: int, got: int, unit: str) -> MalformedRequest:
    return MalformedRequest(
        f"input {tensor.name!r}: expected {expected} {unit} for shape {list(tensor.shape)}, got {got}; "
        "correct shape or data"
    )
