"""A multipart body gives images or one of two errors, and the same images however it is cut into pieces.

Of some bodies that are not quite right, python-multipart takes or refuses the same bytes by where they are cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starlette.requests import Request

from app.errors import MalformedRequest, TooManyImages
from app.http.body import read_images
from app.inference.decoder import EncodedImage
from app.settings import load_settings

LIMITS: Final = load_settings({"max_images_per_request": 4, "upload_seconds": 1000.0})
HEADERS: Final = [(b"content-type", b"multipart/form-data; boundary=b")]

SEEDS: Final = [
    b'\x03--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nxyz'
    b"\r\n--b--\r\n",
    b'\x01--b\r\ncontent-disposition: form-data; name="images"\r\n\r\nx\r\n--b\r\nContent-Disposition: form-data; '
    b"name=images; filename*=utf-8''%e2%82%ac.png\r\n\r\n\r\n--b--",
    b'\xff--b\nContent-Disposition: form-data; name="other"\n\n--b--\n',
]

_runner: Final = asyncio.Runner()
_parser: Final = ThreadPoolExecutor(1)


def check(data: bytes) -> None:
    """The first byte is the size of the pieces, the rest is the body."""
    size, body = max(1, data[0] if data else 1), data[1:]
    whole = _runner.run(_read([body]))
    pieces = _runner.run(_read([body[start : start + size] for start in range(0, len(body), size)] or [b""]))
    if isinstance(whole, list) and isinstance(pieces, list):
        assert whole == pieces, (whole, pieces)


async def _read(pieces: list[bytes]) -> Sequence[EncodedImage] | type[Exception]:
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    try:
        images = await read_images(Request({"type": "http", "headers": HEADERS}, receive), LIMITS, _parser)
    except (MalformedRequest, TooManyImages) as error:
        return type(error)
    assert 0 < len(images) <= LIMITS.max_images_per_request
    return images
