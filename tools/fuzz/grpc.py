"""A message of gRPC is refused, or has each field as often as allowed and gives as many images as it says.

The images are the same in a message that is written anew, with the data as raw contents.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from app.errors import MalformedRequest, TooManyImages
from app.grpc import HIGHER, MAX_OCCURRENCES, METHODS, parse_message, tensor_of
from app.http.v2 import images_of
from tests.app.grpc.occurrences import occurrences

SHAPE: Final = (1, 2, 2)
MAX_IMAGES: Final = 4
NAMES: Final = tuple(METHODS)

_INFER: Final = NAMES.index("ModelInfer")
_IMAGES: Final[dict[str, Any]] = {"name": "images", "datatype": "UINT8", "shape": [1, 1, 2, 2]}
_FILES: Final[dict[str, Any]] = {"name": "encoded_images", "datatype": "BYTES", "shape": [2]}


def _message(method: int, **members: Any) -> bytes:
    return bytes([method]) + bytes(METHODS[NAMES[method]][0](**members).SerializeToString())


SEEDS: Final = [
    _message(_INFER, model_name="m", inputs=[_IMAGES], raw_input_contents=[b"\0\1\2\xff"]),
    _message(_INFER, inputs=[_IMAGES | {"contents": {"uint_contents": [0, 1, 2, 255]}}]),
    _message(_INFER, inputs=[_FILES | {"contents": {"bytes_contents": [b"a", b""]}}], id="a", model_version="1"),
    _message(_INFER, inputs=[_FILES], raw_input_contents=[b"\1\0\0\0a\0\0\0\0"]),
    _message(
        _INFER,
        inputs=[_IMAGES | {"parameters": {"layout": {"string_param": "NHWC"}}, "shape": [1, 2, 2, 1]}],
        outputs=[{"name": "label", "parameters": {"binary_data": {"bool_param": True}}}],
        parameters={"alpha": {"double_param": 0.1}},
        raw_input_contents=[bytes(4)],
    ),
    *(_message(number, name="m", version="1") for number, name in enumerate(NAMES) if name == "ModelMetadata"),
]


def check(data: bytes) -> None:
    """The first byte is the method, the rest is the message."""
    method = NAMES[data[0] % len(NAMES) if data else 0]
    try:
        message = parse_message(data[1:], method)
        images = _images(message) if method == "ModelInfer" else None
    except (MalformedRequest, TooManyImages):
        return
    for field, count in occurrences(message).items():
        assert count <= HIGHER.get(field, MAX_OCCURRENCES), (field, count)
    if images is not None:
        again = METHODS[method][0]()
        again.CopyFrom(message)
        again.inputs[0].ClearField("contents")
        again.raw_input_contents[:] = [bytes(tensor_of(message)[1])]
        assert np.array_equal(images, _images(parse_message(again.SerializeToString(), method)))


def _images(message: Any) -> Any:
    request, binary = tensor_of(message)
    tensor = request.inputs[0]
    images: Any = images_of(tensor, binary, SHAPE, max_images=MAX_IMAGES)
    assert 0 < len(images) == tensor.shape[0] <= MAX_IMAGES
    if not isinstance(images, list):
        assert images.dtype == np.uint8
        assert images.shape[1:] == SHAPE
    return images
