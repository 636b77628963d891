"""Multipart bodies however they are cut into chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from app.errors import ClientGone, TooManyImages
from app.uploads import Upload, UploadLimits, read_images

LIMITS = UploadLimits(max_images=10, max_fields=20, seconds=5.0)
BOUNDARY = "----psc"


def body_of(uploads: list[Upload]) -> bytes:
    parts = b""
    for upload in uploads:
        name = f'; filename="{upload.name}"' if upload.name else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"{name}\r\n\r\n'
        parts += head.encode() + upload.data + b"\r\n"
    return parts + f"--{BOUNDARY}--\r\n".encode()


def request_of(chunks: list[bytes], *, disconnect: bool = False) -> Request:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": disconnect or k < len(chunks) - 1}
        for k, chunk in enumerate(chunks)
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    content_type = f"multipart/form-data; boundary={BOUNDARY}".encode()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type)]}
    return Request(scope, receive)


names = st.none() | st.text("abc.é 7", min_size=1, max_size=8).map(str.strip).filter(bool)


@given(
    st.lists(st.builds(Upload, st.binary(max_size=40), names), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_any_chunking_gives_the_same_images(uploads: list[Upload], size: int) -> None:
    body = body_of(uploads)
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    assert asyncio.run(read_images(request_of(chunks), LIMITS)) == uploads


def test_too_many_images_are_refused_before_the_rest_arrives() -> None:
    body = body_of([Upload(b"x")] * 11)
    cut = body.rindex(b"form-data") + 40
    with pytest.raises(TooManyImages):
        asyncio.run(read_images(request_of([body[:cut]], disconnect=True), LIMITS))


def test_a_client_that_leaves_while_it_sends_is_noticed() -> None:
    body = body_of([Upload(b"x" * 100)])
    with pytest.raises(ClientGone):
        asyncio.run(read_images(request_of([body[:50]], disconnect=True), LIMITS))
