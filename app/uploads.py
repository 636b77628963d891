"""The body of a prediction request → encoded images, counted and limited while it arrives.

Three forms: ``multipart/form-data`` with the field ``images`` repeated, ``application/json`` with
``{"images": [{"b64": …}, …]}``, or one raw ``image/*`` body.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from types import coroutine
from typing import Any, Final

import orjson
from python_multipart.multipart import parse_options_header
from starlette.types import Receive

from app.errors import (
    ClientGone,
    MalformedRequest,
    SlowUpload,
    TooManyImages,
    UnsupportedMedia,
)

FIELD: Final = "images"
_JSON_INLINE_BYTES: Final = 256 * 1024
_BOUNDARY_BYTES: Final = 256
_HEAD_BYTES: Final = 8 * 1024
_USUAL_HEAD: Final = re.compile(
    rb'\r\ncontent-disposition: form-data; name="([^"\\\r\n]*)"(?:; filename="([^"\\\r\n]*)")?(?:\r\n|$)', re.IGNORECASE
)
_FORMS: Final = "multipart/form-data with the field 'images', application/json, or image/*"


@dataclass(frozen=True, slots=True)
class Upload:
    """One encoded image: its bytes and, where the client gave one, its file name."""

    data: bytes
    name: str | None = None


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits on one request: images, multipart fields (images included), seconds to arrive."""

    max_images: int
    max_fields: int
    seconds: float


async def read_images(
    headers: Sequence[tuple[bytes, bytes]],
    receive: Receive,
    limits: UploadLimits,
    *,
    before_waiting: Callable[[], Any] = lambda: None,
) -> list[Upload]:
    """The images of a request, at least one.

    Args:
        headers: Of the request, names in lower case.
        receive: The request's ASGI ``receive``.
        limits: See the class.
        before_waiting: Called when the body is not all there yet; may raise, and the rest is not waited for.

    Raises:
        UnsupportedMedia: The content type is none of the three forms.
        MalformedRequest: The body does not follow its form, or holds no image.
        TooManyImages: More than ``limits.max_images``; raised as soon as it is known.
        SlowUpload: The body did not arrive in time.
        ClientGone: The client left before the body was complete.
    """
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    media = content_type.partition(b";")[0].strip().lower()
    if media.startswith(b"image/"):
        image = await read_body(receive, limits.seconds, before_waiting)
        if not image:
            raise MalformedRequest("expected an image as the body, got an empty body; send the file")
        return [Upload(image)]
    if media == b"application/json":
        body = await read_body(receive, limits.seconds, before_waiting)
        if len(body) <= _JSON_INLINE_BYTES:
            return parse_json(body, limits.max_images)
        return await asyncio.to_thread(parse_json, body, limits.max_images)
    if media == b"multipart/form-data":
        return await _read_multipart(content_type, receive, limits, before_waiting)
    got = repr(media.decode("latin-1")) if media else "no content type"
    raise UnsupportedMedia(f"expected {_FORMS}, got {got}; set Content-Type")


async def read_body(receive: Receive, seconds: float, before_waiting: Callable[[], Any] = lambda: None) -> bytes:
    """The whole body; see :func:`read_images` for ``before_waiting``.

    Raises:
        SlowUpload: It did not arrive within ``seconds``.
        ClientGone: The client left before it was complete.
    """
    chunks: list[bytes] = []
    await _read(receive, chunks.append, seconds, before_waiting)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _read(
    receive: Receive, take: Callable[[bytes], Any], seconds: float, before_waiting: Callable[[], Any]
) -> None:
    """Give every piece of the body to ``take``; a timer is set only when it is not all there already."""
    reading = _pass_on(receive, take)
    try:
        waits_for = reading.send(None)
    except StopIteration:
        return
    try:
        before_waiting()
        async with asyncio.timeout(seconds):
            await _go_on(reading, waits_for)
    except TimeoutError as error:
        raise SlowUpload(f"expected the body within {seconds:g} s; send it faster") from error
    finally:
        reading.close()


async def _pass_on(receive: Receive, take: Callable[[bytes], Any]) -> None:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while the body arrived")
        if body := message.get("body", b""):
            take(body)
        more = message.get("more_body", False)


@coroutine
def _go_on(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Await the rest of a coroutine that was run by hand until it waited."""
    try:
        yield waits_for
    except BaseException as error:
        begun.throw(error)
        raise
    yield from begun.__await__()


def parse_json(body: bytes, max_images: int) -> list[Upload]:
    """Images of a JSON body; see :func:`read_images` for the errors."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"expected JSON, {error.msg} at byte {error.pos}; correct the body") from error
    images = document.get(FIELD) if isinstance(document, dict) else None
    if not isinstance(images, list) or set(document) != {FIELD}:
        raise MalformedRequest('expected {"images": [{"b64": "…"}, …]} and nothing else; correct the body')
    if len(images) > max_images:
        raise TooManyImages(f"expected at most {max_images} images, got {len(images)}; split the request")
    if not images:
        raise MalformedRequest("expected at least one image, got an empty list; add an image")
    return [Upload(_decode_base64(image, index)) for index, image in enumerate(images)]


def _decode_base64(image: Any, index: int) -> bytes:
    text = image.get("b64") if isinstance(image, dict) and len(image) == 1 else None
    if not isinstance(text, str):
        raise MalformedRequest(f'image {index}: expected {{"b64": "…"}} and nothing else; correct the body')
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedRequest(
            f"image {index}: expected base64 with padding and no line breaks, {error}; encode the file again"
        ) from error


class MultipartParser:
    """``multipart/form-data`` (RFC 7578), part by part while it arrives; fields other than images are dropped.

    Args:
        boundary: From the content type.
        limits: On images and fields.

    Attributes:
        images: Of the field :data:`FIELD`, in order.
        others: Names of the other fields.
        ended: Whether the last boundary was seen; what follows it is ignored.
    """

    def __init__(self, boundary: bytes, limits: UploadLimits) -> None:
        self.images: list[Upload] = []
        self.others: set[str] = set()
        self.ended = False
        self._limits = limits
        self._fields = 0
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")
        self._at = 0  # Where the present part begins,
        self._searched = 0  # and up to where it holds no delimiter.
        self._in_head = False  # At first in what precedes the first boundary: a part without a name.
        self._name: str | None = None
        self._file_name: str | None = None

    def feed(self, chunk: bytes) -> None:
        """Parse as far as ``chunk`` allows.

        Raises:
            MalformedRequest: The body does not follow its form, or has too many fields.
            TooManyImages: More than ``limits.max_images``.
        """
        if self.ended:
            return
        self._buffer += chunk
        while self._head() if self._in_head else self._data():
            pass
        del self._buffer[: self._at]
        self._searched -= self._at
        self._at = 0

    def _head(self) -> bool:
        """Read a part's headers; whether they are all there."""
        end = self._buffer.find(b"\r\n\r\n", self._at)
        if (end if end >= 0 else len(self._buffer)) - self._at > _HEAD_BYTES:
            raise MalformedRequest(f"expected at most {_HEAD_BYTES} bytes of headers in a part; correct the body")
        if end < 0:
            return False
        self._fields += 1
        if self._fields > self._limits.max_fields:
            raise MalformedRequest(f"expected at most {self._limits.max_fields} fields; send fewer")
        self._name, self._file_name = _names_of(bytes(self._buffer[self._at : end]))
        if self._name != FIELD:
            self.others.add(self._name)
        elif len(self.images) >= self._limits.max_images:
            raise TooManyImages(f"expected at most {self._limits.max_images} images; split the request")
        self._at = self._searched = end + 4
        self._in_head = False
        return True

    def _data(self) -> bool:
        """Read a part's data; whether they are all there and something follows."""
        buffer = self._buffer
        stop = buffer.find(self._delimiter, self._searched)
        if stop < 0:
            self._searched = max(self._at, len(buffer) - len(self._delimiter))
            return False
        self._searched = stop
        after = stop + len(self._delimiter)
        if len(buffer) < after + 2:
            return False
        following = bytes(buffer[after : after + 2])
        if following not in (b"\r\n", b"--"):  # A longer word that only begins like the boundary.
            self._searched = after
            return True
        if self._name == FIELD:
            with memoryview(buffer) as view:
                self.images.append(Upload(bytes(view[self._at : stop]), self._file_name))
        self._at = self._searched = after
        self.ended = following == b"--"
        self._in_head = True
        return not self.ended


def _names_of(head: bytes) -> tuple[str, str | None]:
    """Field and file name that a part's headers give."""
    usual = _USUAL_HEAD.search(head)
    if usual:
        return usual[1].decode("utf-8", "replace"), (usual[2] or b"").decode("utf-8", "replace") or None
    for line in head.split(b"\r\n"):
        header, _, value = line.partition(b":")
        if header.lower() == b"content-disposition":
            _, options = parse_options_header(value)
            if b"name" in options:
                file_name = options.get(b"filename", b"")
                return options[b"name"].decode("utf-8", "replace"), file_name.decode("utf-8", "replace") or None
    raise MalformedRequest("expected a name in every part's Content-Disposition; correct the body")


async def _read_multipart(
    content_type: bytes, receive: Receive, limits: UploadLimits, before_waiting: Callable[[], Any]
) -> list[Upload]:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _BOUNDARY_BYTES:
        raise MalformedRequest("expected a boundary in the Content-Type; let the HTTP client set it")
    parser = MultipartParser(boundary, limits)
    await _read(receive, parser.feed, limits.seconds, before_waiting)
    if not parser.ended:
        raise MalformedRequest("expected multipart/form-data up to its last boundary, it ends early; resend")
    if not parser.images:
        seen = ", ".join(sorted(map(repr, parser.others))) or "no field"
        raise MalformedRequest(f"expected at least one field {FIELD!r}, got {seen}; name the field {FIELD!r}")
    return parser.images
