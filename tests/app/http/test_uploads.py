"""Multipart bodies however they are cut into chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ClientGone, MalformedRequest, QueueFull, TooManyImages
from app.http.uploads import UploadLimits, read_images
from app.inference.decoder import EncodedImage

LIMITS = UploadLimits(max_images=10, max_fields=20, seconds=5.0)
BOUNDARY = "----psc"


def body_of(uploads: list[Upload]) -> bytes:
    parts = b""
    for upload in uploads:
        name = f'; filename="{upload.name}"' if upload.name else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"{name}\r\n\r\n'
        parts += head.encode() + upload.data + b"\r\n"
    return parts + f"--{BOUNDARY}--\r\n".encode()


def read(chunks: list[bytes], *, disconnect: bool = False, wait: bool = False, **options: Any) -> list[Upload]:
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

    headers = [(b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())]
    return asyncio.run(read_images(headers, receive, LIMITS, **options))


names = st.none() | st.text("abc.é 7", min_size=1, max_size=8).map(str.strip).filter(bool)


@given(
    st.lists(st.builds(Upload, st.binary(max_size=40), names), min_size=1, max_size=6),
    st.integers(1, 30),
    st.booleans(),
)
def test_any_chunking_gives_the_same_images(uploads: list[Upload], size: int, wait: bool) -> None:
    body = body_of(uploads)
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    assert read(chunks, wait=wait) == uploads


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
def test_every_way_to_write_the_names(head: str, name: str | None) -> None:
    body = f"--{BOUNDARY}\r\n{head}\r\n\r\nDATA\r\n--{BOUNDARY}--\r\n".encode()
    assert read([body]) == [EncodedImage(b"DATA", name)]


@pytest.mark.parametrize("before", [b"", b"\r\n"])
def test_what_is_around_the_parts_is_ignored(before: bytes) -> None:
    assert read([before + body_of([EncodedImage(b"x")]) + b"an epilogue"]) == [EncodedImage(b"x")]


def test_headers_without_an_end_are_refused() -> None:
    with pytest.raises(MalformedRequest, match="header size"):
        read([f"--{BOUNDARY}\r\n".encode() + b"x" * 9000], disconnect=True)


def test_too_many_images_are_refused_before_the_rest_arrives() -> None:
    body = body_of([EncodedImage(b"x")] * 11)
    cut = body.rindex(b"form-data") + 40
    with pytest.raises(TooManyImages):
        read([body[:cut]], disconnect=True)


def test_a_client_that_leaves_while_it_sends_is_noticed() -> None:
    body = body_of([EncodedImage(b"x" * 100)])
    for wait in (False, True):
        with pytest.raises(ClientGone):
            read([body[:50]], disconnect=True, wait=wait)


def test_only_a_body_that_is_not_there_yet_is_asked_about() -> None:
    asked: list[bool] = []

    def refuse() -> None:
        asked.append(True)
        raise QueueFull("no room", retry_after=1)

    body = body_of([EncodedImage(b"x")])
    assert read([body], before_waiting=refuse) == [EncodedImage(b"x")]
    assert not asked
    with pytest.raises(QueueFull):
        read([body[:20], body[20:]], wait=True, before_waiting=refuse)
    assert asked == [True]


def read_raw(body: bytes, media_type: bytes) -> Upload:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    (upload,) = asyncio.run(read_images([(b"content-type", media_type)], receive, LIMITS))
    return upload


def test_the_bytes_of_a_raw_body_are_handed_on_as_they_came() -> None:
    """Guards against a copy of every image between the socket and the decoder."""
    body = b"image"
    assert read_raw(body, b"image/png").data is body


@pytest.mark.parametrize("media_type", [b"Image/PNG", b"IMAGE/png; x=1"])
def test_media_types_have_no_case(media_type: bytes) -> None:
    assert read_raw(b"image", media_type).data == b"image"


def test_no_timer_is_set_for_a_body_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a timer for every request; one that waits does get its timer."""
    timers: list[float] = []
    real = asyncio.timeout
    monkeypatch.setattr("app.http.uploads.asyncio.timeout", lambda seconds: timers.append(seconds) or real(seconds))
    body = body_of([EncodedImage(b"x")])
    read([body[:20], body[20:]])
    assert timers == []
    read([body], wait=True)
    assert timers == [LIMITS.seconds]
