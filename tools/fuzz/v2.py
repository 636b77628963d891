"""A v2 request is refused, or gives as many images as it says, the same from JSON as from binary data."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from app.errors import MalformedRequest, TooManyImages
from app.http.v2 import images_of, parse_request

SHAPE: Final = (1, 2, 2)
MAX_IMAGES: Final = 4

_BINARY: Final = (
    b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,1,2,2],"parameters":{"binary_data_size":4}}]}'
)
SEEDS: Final = [
    b'\0{"inputs":[{"name":"images","datatype":"UINT8","shape":[2,1,2,2],"data":[0,1,2,3,4,5,6,255]}]}',
    b'\0{"id":"a","inputs":[{"name":"images","datatype":"UINT8","shape":[1,2,2,1],"data":[[[[0],[1]],[[2],[3]]]]}],'
    b'"outputs":[{"name":"label","parameters":{"binary_data":true}}],"parameters":{"alpha":0.1}}',
    b'\0{"inputs":[{"name":"encoded_images","datatype":"BYTES","shape":[2],"data":["AAAA","AA=="]}]}',
    bytes([len(_BINARY)]) + _BINARY + b"\0\x01\x02\x03",
]


def check(data: bytes) -> None:
    """The first byte is the length of the JSON where binary data follow it, else 0; the rest is the body."""
    length, body = data[0] if data else 0, data[1:]
    try:
        request, binary = parse_request(body, str(length) if length else None)
        tensor = request.inputs[0]
        images: Any = images_of(tensor, binary, SHAPE, max_images=MAX_IMAGES)
    except (MalformedRequest, TooManyImages):
        return
    assert 0 < len(images) == tensor.shape[0] <= MAX_IMAGES
    if isinstance(images, list):
        assert all(isinstance(each, bytes) for each in images)
        return
    assert images.dtype == np.uint8
    assert images.shape[1:] == SHAPE
    sent = images.reshape(tensor.shape)  # One channel: its place does not matter.
    assert (images_of(tensor, memoryview(sent.tobytes()), SHAPE, max_images=MAX_IMAGES) == images).all()
