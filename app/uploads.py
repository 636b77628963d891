"""The body of a prediction request → encoded images, counted and limited while it arrives.

Three forms: ``multipart/form-data`` with the field ``images`` repeated, ``application/json`` with
``{"images": [{"b64": …}, …]}``, or one raw ``image/*`` body.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from types import coroutine
from typing import Any, Final

import orjson
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
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
    content_type = b""
    for name, value in headers:
        if name == b"content-type":
            content_type = value
            break
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


class _Parts:
    """Callbacks of the streaming parser: keeps image parts, counts and drops every other field."""

    def __init__(self, limits: UploadLimits) -> None:
        self.images: list[Upload] = []
        self.others: list[str] = []
        self.ended = False
        self._limits = limits
        self._fields = 0
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._file_name: str | None = None
        self._data = bytearray()

    def on_part_begin(self) -> None:
        self._fields += 1
        if self._fields > self._limits.max_fields:
            raise MalformedRequest(f"expected at most {self._limits.max_fields} fields; send fewer")
        self._disposition = b""
        self._data = bytearray()

    def on_header_begin(self) -> None:
        self._header_name = b""
        self._header_value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise MalformedRequest("expected a name in every part's Content-Disposition; correct the body")
        self._name = options[b"name"].decode("utf-8", "replace")
        file_name = options.get(b"filename")
        self._file_name = file_name.decode("utf-8", "replace") if file_name else None
        if self._name == FIELD and len(self.images) >= self._limits.max_images:
            raise TooManyImages(f"expected at most {self._limits.max_images} images; split the request")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FIELD:
            self._data += data[start:end]

    def on_part_end(self) -> None:
        if self._name == FIELD:
            self.images.append(Upload(bytes(self._data), self._file_name))
        else:
            self.others.append(self._name)

    def on_end(self) -> None:
        self.ended = True


async def _read_multipart(
    content_type: bytes, receive: Receive, limits: UploadLimits, before_waiting: Callable[[], Any]
) -> list[Upload]:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise MalformedRequest("expected a boundary in the Content-Type; let the HTTP client set it")
    parts = _Parts(limits)
    try:
        callbacks: Any = {name: getattr(parts, name) for name in vars(_Parts) if name.startswith("on_")}
        parser = MultipartParser(boundary, callbacks)
        await _read(receive, parser.write, limits.seconds, before_waiting)
        parser.finalize()
    except FormParserError as error:
        raise MalformedRequest(f"expected multipart/form-data, {error}; correct the body") from error
    if not parts.ended:
        raise MalformedRequest("expected multipart/form-data up to its last boundary, it ends early; resend")
    if not parts.images:
        seen = ", ".join(sorted({repr(name) for name in parts.others})) or "no field"
        raise MalformedRequest(f"expected at least one field {FIELD!r}, got {seen}; name the field {FIELD!r}")
    return parts.images
