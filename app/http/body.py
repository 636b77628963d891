"""Read the query and the body of a request, within limits that hold while the body arrives.

The images of a prediction come in one of three forms: ``multipart/form-data`` with the field ``images`` repeated,
``application/json`` with ``{"images": [{"b64": …}, …]}``, or one image file as ``image/*``.

The cost of JSON lies in its values, not its bytes: a megabyte of ``[],`` takes 0.1 s and 30 MB to parse, a hundred
times as much as a megabyte of base64, and the interpreter's lock is held throughout.  So commas, colons and brackets
are counted first, piece by piece at a gigabyte per second: a document cannot have more values than these.  (Those
inside strings count too, but no string that the service reads has many.)
"""

from __future__ import annotations

import asyncio
import binascii
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from app.errors import ClientGone, MalformedRequest, SlowUpload, TooManyImages, UnsupportedEncoding, UnsupportedMedia
from app.inference.decoder import EncodedImage
from app.settings import Settings
from psc_core.errors import all_faults, hint, shorten

MAX_VALUES: Final = 1 << 22  # the maximum number of values in one document; parsing them takes 0.1 s
MAX_CONTAINERS: Final = 1 << 18  # the maximum number of lists, objects and keys; parsing them takes as long
_MOST: Final = {b"[{:": MAX_CONTAINERS, b"[{:,": MAX_VALUES}
_PIECE: Final = 1 << 18  # the bytes counted at a time; between two pieces, other threads get the interpreter's lock


def _count_pieces(most: Mapping[bytes, int]) -> Callable[[bytes], bool]:
    """Return a function that counts some characters of a body, piece by piece, and says whether there are too many.

    ``most`` maps a set of characters to the maximum number of all of them together.
    """
    found = Counter(dict.fromkeys(b"".join(most), 0))

    def has_too_many(piece: bytes) -> bool:
        found.update({mark: piece.count(mark) for mark in found})
        return any(sum(found[mark] for mark in together) > limit for together, limit in most.items())

    return has_too_many


def has_more(body: bytes, most: Mapping[bytes, int]) -> bool:
    """Return whether some characters occur more often than ``most`` allows; counting stops once that is known."""
    return any(map(_count_pieces(most), (body[start : start + _PIECE] for start in range(0, len(body), _PIECE))))


def _too_costly() -> MalformedRequest:
    return MalformedRequest(
        f"expected JSON of at most {MAX_VALUES} values and {MAX_CONTAINERS} lists, objects and keys, got "
        "more; send fewer images, image files instead of pixels, or binary data"
    )


def load_json(body: bytes) -> Any:
    """Return the document."""
    if has_more(body, _MOST):
        raise _too_costly()
    return parsed(body)


def parsed(body: bytes) -> Any:
    """Return a document whose values were counted before; counting them again takes longer than parsing it."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from error


def has_disconnected(receive: Receive) -> bool:
    """Return whether the client has closed its connection; call it only after the whole body was read.

    While the client is connected, ``receive()`` waits.  So it is driven one step by hand: either it returns at once
    (the client has left), or it suspends and is closed.  A sweep over all requests costs less than a task for each.
    """
    waiting = receive().__await__()
    try:
        next(waiting)
    except StopIteration as message:
        return bool(message.value["type"] == "http.disconnect")
    close = getattr(waiting, "close", None)  # Awaitables other than coroutines have none.
    if close is not None:
        close()
    return False


Query = TypeVar("Query", bound=BaseModel)


def parse_query(model: type[Query], request: Request) -> Query:
    """Parse the query parameters of a request to a route that takes some; those that take none ignore them.

    FastAPI would ignore unknown parameters, and silently take the last value of a repeated one.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in model.model_fields:
            raise MalformedRequest(f"there is no parameter {shorten(name)}; {hint(name, [*model.model_fields])}")
    if len(set(given)) < len(given):
        raise MalformedRequest(f"give each parameter once, got {', '.join(given)}")
    try:
        return model.model_validate_strings(dict(request.query_params))
    except ValidationError as error:
        raise MalformedRequest(all_faults(error.errors(), "parameter")) from error


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return a model's parameters as OpenAPI describes them."""
    return [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]


Parsed = TypeVar("Parsed")
FIELD: Final = "images"
FILE_SCHEMA: Final = {"type": "string", "format": "binary"}
_BASE64_SCHEMA: Final = {
    "type": "string",
    "contentEncoding": "base64",
    "pattern": r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "description": "Base64 of an image file, padded, without line breaks.",
}


def _with(name: str, schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the schema of an object with this member."""
    return {"type": "object", "required": [name], "properties": {name: schema}, **options}


_FILES: Final = {"items": FILE_SCHEMA, "description": "JPEG, PNG, WebP, BMP, GIF (first frame) or TIFF files."}
_OBJECTS: Final = {"items": _with("b64", _BASE64_SCHEMA, additionalProperties=False)}
_SOME: Final = {"type": "array", "minItems": 1}
# The request body of a prediction, for OpenAPI.
IMAGES_BODY: Final[dict[str, Any]] = {
    "required": True,
    "description": "The images, in one of three forms.",
    "content": {
        "multipart/form-data": {"schema": _with(FIELD, _SOME | _FILES, additionalProperties=False)},
        "application/json": {"schema": _with(FIELD, _SOME | _OBJECTS, additionalProperties=False)},
        "image/*": {"schema": FILE_SCHEMA},
    },
}
_INLINE_BYTES: Final = 256 * 1024  # the largest body that is parsed on the event loop; a larger one would hold it up
# The maximum number of parameters of a part's ``Content-Disposition``, or of semicolons in its file name.
_MAX_PARAMETERS: Final = 16
_CHARSETS: Final = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})  # the charsets whose texts are UTF-8
_RAW: Final = frozenset({b"binary", b"8bit", b"7bit", b"identity"})  # the encodings that leave bytes as they are
_FORMS: Final = "multipart/form-data with the field 'images', application/json, or image/*"


GIVEN: Final = "images"  # in the scope of a request, its images as a front has read them, or its error


async def read_images(request: Request, settings: Settings, parser: Executor) -> Sequence[EncodedImage]:
    """Read the images of a request, at least one."""
    given: Sequence[EncodedImage] | Exception | None = request.scope.get(GIVEN)
    if isinstance(given, Exception):
        raise given
    if given is not None:
        return given
    content_type = request.headers.get("content-type", "")
    media = content_type.partition(";")[0].strip().lower()
    if media.startswith("image/"):
        image = await read_body(request, settings.upload_seconds)
        if not image:
            raise MalformedRequest("the body is empty; send the image file as the body")
        return [EncodedImage(image)]
    if media == "application/json":
        body = await read_json_body(request, settings.upload_seconds)
        return await parse(parser, body, parse_json, body, settings.max_images_per_request)
    if media == "multipart/form-data":
        return await _read_multipart(content_type, request, settings)
    got = repr(media) if media else "no content type"
    raise UnsupportedMedia(f"expected {_FORMS}, got {got}; set Content-Type")


async def read_body(request: Request, seconds: float) -> bytes:
    """Read the whole body."""
    pieces: list[bytes] = []
    await _read(request, pieces.append, seconds)
    return b"".join(pieces)


async def read_json_body(request: Request, seconds: float) -> bytes:
    """Read the whole body, a JSON document."""
    content_type = request.headers.get("content-type", "")
    if ";" in content_type:
        charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
        if charset.lower() not in _CHARSETS:
            raise UnsupportedMedia(f"expected JSON in UTF-8, got charset={charset[:64]}; encode the body in UTF-8")
    pieces: list[bytes] = []
    has_too_many = _count_pieces(_MOST)

    def take(piece: bytes) -> None:
        if has_too_many(piece):
            raise _too_costly()
        pieces.append(piece)

    await _read(request, take, seconds)
    return b"".join(pieces)


async def parse(parser: Executor, body: bytes, work: Callable[..., Parsed], *arguments: Any) -> Parsed:
    """Return ``work(*arguments)``; for a large body it runs in ``parser``, so as not to hold up the event loop."""
    if len(body) <= _INLINE_BYTES:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(parser, work, *arguments)


async def _read(request: Request, take: Callable[[bytes], Any], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                if piece:
                    take(piece)
    except TimeoutError as error:
        raise SlowUpload(f"the body did not arrive within {seconds:g} s; send it faster") from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while the body arrived") from error


def parse_json(body: bytes, max_images: int) -> list[EncodedImage]:
    """Return the images of a JSON body from :func:`read_json_body`; raises the errors of :func:`read_images`."""
    if has_more(body, {b"{": max_images + 1}):  # Each image is an object: too many are refused before they are parsed.
        raise TooManyImages(f"expected at most {max_images} images, got more; split the request")
    document = parsed(body)
    images = document.get(FIELD) if isinstance(document, dict) else None
    if not isinstance(images, list) or set(document) != {FIELD}:
        raise MalformedRequest('expected {"images": [{"b64": "…"}, …]} and nothing else; correct the body')
    if len(images) > max_images:
        raise TooManyImages(f"expected at most {max_images} images, got {len(images)}; split the request")
    if not images:
        raise MalformedRequest("the list of images is empty; add an image")
    return [EncodedImage(_file_of(image, index)) for index, image in enumerate(images)]


def _file_of(image: Any, index: int) -> bytes:
    text = image.get("b64") if isinstance(image, dict) and len(image) == 1 else None
    if not isinstance(text, str):
        raise MalformedRequest(f'image {index}: expected {{"b64": "…"}} and nothing else; correct the body')
    return decode_base64(text, f"image {index}")


def decode_base64(text: Any, where: str) -> bytes:
    """Decode strict base64 text; raises :class:`MalformedRequest`, whose text begins with ``where``."""
    if isinstance(text, str) and text.startswith("data:"):
        raise MalformedRequest(f"{where}: expected base64, got a data: URL; send only what follows its comma")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (TypeError, ValueError) as error:  # binascii.Error is a ValueError.
        raise MalformedRequest(f"{where}: expected base64 with padding and without line breaks ({error})") from error


class _FormFields:
    """The callbacks of the streaming parser, which keep the images and refuse every other field."""

    def __init__(self, settings: Settings) -> None:
        self.images: list[EncodedImage] = []
        self.ended = False
        self._max_images = settings.max_images_per_request
        self._header_name = self._header_value = b""
        self._disposition = self._encoding = b""
        self._file_name: str | None = None
        self._data = bytearray()

    def on_part_begin(self) -> None:
        self._disposition = self._encoding = b""
        self._data = bytearray()

    def on_header_begin(self) -> None:
        self._header_name = self._header_value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        name = self._header_name.lower()
        if name in (b"content-transfer-encoding", b"content-encoding"):
            if self._header_value.strip().lower() not in _RAW:
                self._encoding = self._header_name + b": " + self._header_value[:64]
        elif name == b"content-disposition":
            if self._header_value.count(b";") > _MAX_PARAMETERS:
                raise MalformedRequest(f"a part's header has more than {_MAX_PARAMETERS} parameters; send fewer")
            self._disposition = self._header_value

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise MalformedRequest("a part has no name in its Content-Disposition; add one")
        if (name := options[b"name"].decode("utf-8", "replace")) != FIELD:
            raise MalformedRequest(
                f"there is no field {shorten(repr(name))}; send images as {FIELD!r}, and parameters in the query, such "
                "as ?alpha=0.1"
            )
        file_name = options.get(b"filename")
        self._file_name = file_name.decode("utf-8", "replace") if file_name else None
        if self._encoding:
            raise UnsupportedEncoding(
                f"expected the bytes of image files, got {self._encoding.decode('latin-1')}; send them as they are"
            )
        if len(self.images) >= self._max_images:
            raise TooManyImages(f"expected at most {self._max_images} images; split the request")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def on_part_end(self) -> None:
        self.images.append(EncodedImage(bytes(self._data), self._file_name))

    def on_end(self) -> None:
        self.ended = True


def _after_preamble(boundary: bytes, write: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    """Return a function that passes a body on from its first boundary; what is before it has no meaning (RFC 2046)."""
    mark, before, has_begun = b"\r\n--" + boundary, b"\r\n", False

    def take(piece: bytes) -> None:
        nonlocal before, has_begun
        if not has_begun:
            before += piece
            at = before.find(mark)
            if at < 0:
                before = before[-len(mark) :]
                return
            piece, has_begun = before[at + 2 :], True
        write(piece)

    return take


async def _read_multipart(content_type: str, request: Request, settings: Settings) -> list[EncodedImage]:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise MalformedRequest("the Content-Type has no boundary; let the HTTP client set it")
    parts = _FormFields(settings)
    try:
        callbacks: Any = {name: getattr(parts, name) for name in vars(_FormFields) if name.startswith("on_")}
        parser = MultipartParser(boundary, callbacks)
        await _read(request, _after_preamble(boundary, parser.write), settings.upload_seconds)
        parser.finalize()
    except FormParserError as error:
        raise MalformedRequest(f"the body is not multipart/form-data: {error}") from error
    if not parts.ended:
        raise MalformedRequest("the multipart body ends before its last boundary; send it again")
    if not parts.images:
        raise MalformedRequest(f"the body has no field; send images as {FIELD!r}")
    return parts.images
