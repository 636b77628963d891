"""Bodies of the three forms, however they are cut into chunks, and what JSON may cost."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from app.errors import ClientGone, MalformedRequest, SlowUpload, TooManyImages, UnsupportedEncoding, UnsupportedMedia
from app.http.body import MAX_CONTAINERS, MAX_VALUES, has_disconnected, has_more, load_json, parse_json, read_images
from app.http.v2 import parse_request
from app.inference.decoder import EncodedImage
from app.settings import Settings, load_settings

pytestmark = pytest.mark.anyio


LIMITS = load_settings({"max_images_per_request": 10, "upload_seconds": 5.0})
BOUNDARY = "----psc"


def body_of(images: list[EncodedImage]) -> bytes:
    parts = b""
    for image in images:
        name = f'; filename="{image.name}"' if image.name else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"{name}\r\n\r\n'
        parts += head.encode() + image.data + b"\r\n"
    return parts + f"--{BOUNDARY}--\r\n".encode()


def read(
    chunks: list[bytes],
    media_type: str = f"multipart/form-data; boundary={BOUNDARY}",
    *,
    disconnect: bool = False,
    wait: bool = False,
    limits: Settings = LIMITS,
) -> list[EncodedImage]:
    """The images of a body that arrives in ``chunks``; ``wait``: each needs a turn of the event loop."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": disconnect or k < len(chunks) - 1}
        for k, chunk in enumerate(chunks)
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        if wait:
            await asyncio.sleep(0)
        return messages.pop(0)

    scope = {"type": "http", "headers": [(b"content-type", media_type.encode())]}
    with ThreadPoolExecutor(1) as parser:
        return asyncio.run(read_images(Request(scope, receive), limits, parser))


names = st.none() | st.text("abc.é 7", min_size=1, max_size=8).map(str.strip).filter(bool)


@given(
    st.lists(st.builds(EncodedImage, st.binary(max_size=40), names), min_size=1, max_size=6),
    st.integers(1, 30),
    st.booleans(),
)
def test_any_chunking_gives_the_same_images(images: list[EncodedImage], size: int, wait: bool) -> None:
    body = body_of(images)
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    assert read(chunks, wait=wait) == images


@given(
    st.lists(
        st.sampled_from([b"\r\n", b"--", b"-", f"--{BOUNDARY}".encode(), f"\r\n--{BOUNDARY}x".encode(), b"\r", b"A"]),
        max_size=12,
    ),
    st.integers(1, 9),
)
def test_data_that_looks_like_a_boundary_is_kept(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    delimiter = f"\r\n--{BOUNDARY}".encode()
    if any((b"\r\n" + data).find(delimiter + end) >= 0 for end in (b"\r\n", b"--")) or data.endswith(delimiter):
        return  # It *is* a boundary.
    body = body_of([EncodedImage(data)])
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    assert read(chunks) == [EncodedImage(data)]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ('Content-Type: image/png\r\nCONTENT-DISPOSITION:form-data; filename="a.png"; name=images', "a.png"),
        (r'Content-Disposition: form-data; name="images"; filename="a\"b.png"', 'a"b.png'),
        ('Content-Disposition: form-data; name="images"; filename=""', None),
        ("Content-Disposition: form-data; name=\"images\"; filename*=utf-8''x", None),
        ('Content-Disposition: form-data; name="images"', None),
    ],
)
def test_reads_every_spelling_of_names(head: str, name: str | None) -> None:
    body = f"--{BOUNDARY}\r\n{head}\r\n\r\nDATA\r\n--{BOUNDARY}--\r\n".encode()
    assert read([body]) == [EncodedImage(b"DATA", name)]


@pytest.mark.parametrize("before", [b"", b"\r\n", b"a preamble\r\n", b"--\r\n--" + BOUNDARY.encode()[:-1] + b"\r\n"])
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_ignores_what_is_around_the_parts(before: bytes, size: int) -> None:
    body = before + body_of([EncodedImage(b"x")]) + b"an epilogue"
    assert read([body[start : start + size] for start in range(0, len(body), size)]) == [EncodedImage(b"x")]


@pytest.mark.parametrize(
    "head",
    ["x" * 9000, f"Content-Disposition: form-data; name=images{';' * 17}\r\n\r\n"],
    ids=["long", "many parameters"],
)
def test_rejects_endless_headers(head: str) -> None:
    with pytest.raises(MalformedRequest):
        read([f"--{BOUNDARY}\r\n{head}".encode()], disconnect=True)


@pytest.mark.parametrize("name", ["image", "Images", "images[]", "file", "alpha", "", "\x01" * 4000])
@pytest.mark.parametrize("images", [0, 1])
def test_another_field_is_refused_before_the_rest_arrives(name: str, images: int) -> None:
    first = body_of([EncodedImage(b"x")] * images).removesuffix(b"--\r\n").removesuffix(f"--{BOUNDARY}".encode())
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
    with pytest.raises(MalformedRequest, match=r"there is no field .* 'images', and parameters in the query") as caught:
        read([first + part.encode()], disconnect=True)
    assert repr(name[:9])[1:-1] in str(caught.value) and len(str(caught.value)) < 500


def test_rejects_too_many_images_before_the_rest_arrives() -> None:
    body = body_of([EncodedImage(b"x")] * 11)
    cut = body.rindex(b"form-data") + 40
    with pytest.raises(TooManyImages):
        read([body[:cut]], disconnect=True)


def test_rejects_too_many_values_before_the_rest_arrives() -> None:
    half = b"[]," * (MAX_CONTAINERS // 2 + 1)
    with pytest.raises(MalformedRequest):
        read([b'{"images":[', half, half], "application/json", disconnect=True)


def test_client_that_leaves_while_sending() -> None:
    body = body_of([EncodedImage(b"x" * 100)])
    for wait in (False, True):
        with pytest.raises(ClientGone):
            read([body[:50]], disconnect=True, wait=wait)


@pytest.mark.parametrize("media_type", ["image/png", "application/json", "multipart/form-data; boundary=x"])
def test_slow_body(media_type: str) -> None:
    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    limits = load_settings({"max_images_per_request": 10, "upload_seconds": 0.01})
    scope = {"type": "http", "headers": [(b"content-type", media_type.encode())]}
    with pytest.raises(SlowUpload):
        asyncio.run(read_images(Request(scope, receive), limits, ThreadPoolExecutor(1)))


def test_raw_body_is_not_copied() -> None:
    """Guards against a copy of every image between the socket and the decoder."""
    body = b"image"
    assert read([body], "image/png")[0].data is body


@pytest.mark.parametrize(
    ("media_type", "body", "data"),
    [
        *((media_type, b"image", b"image") for media_type in ("Image/PNG", "IMAGE/png; x=1")),
        *((f"application/json{more}", b'{"images": [{"b64": "QQ=="}]}', b"A")
          for more in ("", "; charset=UTF-8", '; charset="utf-8"', "; profile=x")),
    ],
)  # fmt: skip
def test_media_types_of_any_spelling_are_read(media_type: str, body: bytes, data: bytes) -> None:
    assert read([body], media_type) == [EncodedImage(data)]


@pytest.mark.parametrize(
    "media_type",
    [
        *("", "text/plain", "multipart/mixed; boundary=x"),
        *(
            f"application/json; charset={charset}"
            for charset in ("latin-1", "UTF-16", '"utf-16"', "utf-8;charset=utf-16")
        ),
    ],
)
def test_rejects_other_media_types(media_type: str) -> None:
    with pytest.raises(UnsupportedMedia):
        read([b'{"images": [{"b64": "QQ=="}]}'], media_type)


@pytest.mark.parametrize(
    "head",
    ["Content-Transfer-Encoding: base64", "content-transfer-encoding: Quoted-Printable", "Content-Encoding: gzip"],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_encoded_part_is_refused(head: str, first: bool) -> None:
    disposition = 'Content-Disposition: form-data; name="images"'
    heads = "\r\n".join([head, disposition] if first else [disposition, head])
    with pytest.raises(UnsupportedEncoding, match=head.partition(":")[0]):
        read([f"--{BOUNDARY}\r\n{heads}\r\n\r\niVBORw0KGgo=\r\n--{BOUNDARY}--\r\n".encode()])


def test_a_part_that_says_it_is_not_encoded_is_read() -> None:
    heads = 'Content-Transfer-Encoding: Binary\r\nContent-Disposition: form-data; name="images"'
    assert read([f"--{BOUNDARY}\r\n{heads}\r\n\r\nfile\r\n--{BOUNDARY}--\r\n".encode()]) == [EncodedImage(b"file")]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (MAX_CONTAINERS + 1),
        b"[" + b"[]," * MAX_CONTAINERS + b"0]",
        b"[" + b"{}," * MAX_CONTAINERS + b"0]",
        b"[" + b"0," * MAX_VALUES + b"0]",
        b"{" + b'"k":0,' * MAX_CONTAINERS + b'"k":0}',
    ],
    ids=["deep", "lists", "objects", "numbers", "keys"],
)
def test_too_many_values_are_refused_before_they_exist(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was parsed"))
    for parse in (load_json, lambda text: parse_request(text, None)):
        with pytest.raises(MalformedRequest):
            parse(body)


@given(st.text("[{:, ", max_size=40), st.integers(0, 12), st.integers(0, 20), st.integers(1, 9))
def test_counts_piece_by_piece_as_at_once(text: str, most: int, most_with_commas: int, piece: int) -> None:
    found = sum(text.count(mark) for mark in "[{:")
    too_many = found > most or found + text.count(",") > most_with_commas
    with mock.patch("app.http.body._PIECE", piece):
        assert has_more(text.encode(), {b"[{:": most, b"[{:,": most_with_commas}) == too_many


def test_images_are_counted_before_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was parsed"))
    with pytest.raises(TooManyImages):
        parse_json(b'{"images":[' + b'{"b64":""},' * 3 + b'{"b64":""}]}', 3)


def test_what_is_allowed_is_parsed() -> None:
    numbers = load_json(b"[" + b"0," * (MAX_VALUES - 2) + b"0]")
    assert len(numbers) == MAX_VALUES - 1
    assert load_json(b'{"a": [1, {"b": "c"}]}') == {"a": [1, {"b": "c"}]}
    with pytest.raises(MalformedRequest):
        load_json(b"{")


async def test_a_client_that_has_left_and_one_that_waits() -> None:
    asked = 0
    left = asyncio.Event()

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        await left.wait()
        return {"type": "http.disconnect"}

    assert not has_disconnected(receive)
    assert not has_disconnected(receive)
    left.set()
    assert has_disconnected(receive)
    assert asked == 3


async def test_more_of_a_body_is_no_departure() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    assert not has_disconnected(receive)
