"""What a request costs until its images are known is at most linear in its bytes, whatever they are.

Many of one thing is what makes parsers slow, so a body is a beginning, few tokens of its form many times, and an end.
The images themselves cost by their pixels, see :mod:`psc_core.images`.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

pytest.importorskip("grpc", reason="the gRPC extra is not installed")

from app.grpc import parse_message, tensor_of
from app.http.body import read_images
from app.http.v2 import images_of, parse_request
from app.settings import load_settings
from psc_core.errors import PSCError
from tests.conftest import ROOT
from tools.attack_grpc import PARAMETER
from tools.attack_grpc import nested as content

SECONDS: Final = 0.5
SECONDS_A_BYTE: Final = 20e-6
BYTES: Final = 4 << 20
BYTES_A_BYTE: Final = 400  # What a request may cost; docs/security.md states it

LONGEST: Final = 1 << 16  # Bytes of the longest body; at this length a cost by the square is far above the line

PARSER: Final = ThreadPoolExecutor(1)
LIMITS: Final = load_settings({"max_images_per_request": 512, "upload_seconds": 1000.0})
SHAPE: Final = (1, 8, 8)


def nested(body: bytes, number: int) -> bytes:
    return bytes([number << 3 | 2]) + content(body)


def http(media: bytes) -> Callable[[bytes], Any]:
    def read(body: bytes) -> Any:
        pieces = [body[start : start + 1000] for start in range(0, len(body), 1000)] or [b""]
        messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        messages[-1]["more_body"] = False

        async def receive() -> Any:
            return messages.pop(0)

        scope = {"type": "http", "headers": [(b"content-type", media)]}
        return asyncio.run(read_images(Request(scope, receive), LIMITS, PARSER))

    return read


def rest(body: bytes) -> Any:
    request, binary = parse_request(body, None)
    return images_of(request.inputs[0], binary, SHAPE, max_images=LIMITS.max_images_per_request)


def rest_binary(body: bytes) -> Any:
    inputs = b'[{"name":"encoded_images","datatype":"BYTES","shape":[512],"parameters":{"binary_data_size":%d}}]'
    head = b'{"inputs":%s}' % (inputs % len(body))
    request, binary = parse_request(head + body, str(len(head)))
    return images_of(request.inputs[0], binary, SHAPE, max_images=LIMITS.max_images_per_request)


def call(body: bytes) -> Any:
    message = parse_message(body, "ModelInfer")
    request, binary = tensor_of(message)
    return message, images_of(request.inputs[0], binary, SHAPE, max_images=LIMITS.max_images_per_request)


V2: Final = b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,8,8,1],"data":['
OUTPUTS: Final = V2 + b'0]}],"outputs":['
PART: Final = b'--b\r\nContent-Disposition: form-data; name="images"'
IMAGE: Final = PART + b"\r\n\r\n\r\n"
END: Final = b"\r\n\r\n\r\n--b--\r\n"
JSON: Final = (*(bytes([byte]) for byte in b'[]{},:"0-\\ '), b'"k"', b"1e999", b"\\u0000", b"null")
FIELDS: Final = b"\x32\0", b"\x2a\0", b"\x3a\0", PARAMETER, b"\x0a\0", b"\x7a\0", b"\x78\x01", b"\x42\0", b"\x20\x01"
TENSOR: Final = b"\x0a\x06images\x12\x05UINT8\x1a\x04\x01\x08\x08\x01"


class Entry(NamedTuple):
    """How a body of one form is read, and what such bodies are made of."""

    read: Callable[[bytes], Any]
    starts: Sequence[bytes]
    tokens: Sequence[bytes]
    ends: Sequence[bytes]
    known: Sequence[tuple[bytes, bytes, bytes]]
    """A start, a token and an end that cost most."""


ENTRIES: Final = {
    "json": Entry(
        http(b"application/json"),
        (b"", b'{"images":[', b'{"images":[{"b64":"'),
        (*JSON, b'{"b64":""},', b'{"b64":"AAAA"},', b"AAAA", b"="),
        (b"", b"0]}", b'{"b64":""}]}', b'"}]}'),
        ((b'{"images":[', b"[],", b"0]}"), (b'{"images":[', b'"",', b"0]}"), (b'{"images":[', b"[", b"")),
    ),
    "multipart": Entry(
        http(b"multipart/form-data; boundary=b"),
        (b"", PART, PART + b"\r\n\r\n", IMAGE),
        (*(bytes([byte]) for byte in b';"\\\r\n\x01=a'), b"\r\n", b"a=b;", b"*0=", b"%e2", b"a: b\r\n", b"--b", IMAGE),
        (b"", END, b"\r\n--b--"),
        ((PART, b";a=b", END), (PART, b"\r\na: b", END), (b"", IMAGE, END), (PART + b';filename="', b"\\", b'"' + END)),
    ),
    "v2": Entry(
        rest,
        (b"", V2, OUTPUTS, OUTPUTS + b'],"parameters":{', OUTPUTS + b'{"parameters":{'),
        (*JSON, b"[],", b"{},", b'"",', b"0,", b"[0],", b'{"name":"a"},', b'"k":[],'),
        (b"", b"0]}]}", b"{}]}", b'"k":0}}', b'"k":0}}]}'),
        (
            *((V2, token, b"0]}]}") for token in (b"0,", b"[],", b"[0],", b'"",', b"[")),
            (OUTPUTS, b"{},", b"{}]}"),
            (V2[:-8] + b',"k":[', b"{},", b"{}]}]}"),
        ),
    ),
    "v2, binary": Entry(
        rest_binary, (b"",), (bytes(4), b"\1\0\0\0a", b"\xff\xff\0\0", b"\0"), (b"",), ((b"", bytes(4), b""),)
    ),
    "grpc": Entry(
        call, (b"", nested(TENSOR, 5)), (*FIELDS, b"\x0b", b"\xff", b"\x80", b"\x0a\x01\xff"), (b"",),
        ((b"", nested(nested(b"\x42\0" * (1 << 14), 5), 5), b""), (b"", b"\x32\0", b"")),
    ),
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn, name: str) -> bytes:
    entry = ENTRIES[name]
    tokens = st.one_of(st.sampled_from(entry.tokens), st.binary(max_size=3))
    unit = b"".join(draw(st.lists(tokens, min_size=1, max_size=3)))
    middle = repeated(unit, draw(st.sampled_from([100, LONGEST // 8, LONGEST])))
    if name == "grpc":  # In an input, or in its contents.
        for _ in range(draw(st.integers(0, 2))):
            middle = nested(middle, 5)
    return draw(st.sampled_from(entry.starts)) + middle + draw(st.sampled_from(entry.ends))


def repeated(unit: bytes, size: int) -> bytes:
    return unit * max(1, size // max(1, len(unit)))


class Heap(ctypes.Structure):
    """Of glibc: what the libraries hold that do not ask Python for memory."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "mapped", "e", "f", "used", "g", "h")]


def allocated() -> int:
    """Bytes that are held from glibc; 0 with another library."""
    mallinfo: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Heap
    heap = mallinfo()
    return int(heap.used + heap.mapped)


def answer(read: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return read(body)
    except PSCError as error:
        return error


def cost(read: Callable[[bytes], Any], body: bytes) -> tuple[float, int]:
    """Seconds of the processor, and bytes: the most that Python had and what others have, some of it counted twice."""
    began = time.process_time()
    answer(read, body)
    seconds = time.process_time() - began
    before = allocated()
    tracemalloc.start()
    kept = answer(read, body)
    grown = allocated() - before + tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return seconds, grown


def check(name: str, body: bytes) -> None:
    seconds, grown = cost(ENTRIES[name].read, body)
    assert seconds <= SECONDS + SECONDS_A_BYTE * len(body), (seconds, len(body))
    assert grown <= BYTES + BYTES_A_BYTE * len(body), (grown, len(body))


@pytest.mark.parametrize("name", ENTRIES)
def test_a_request_costs_by_its_bytes(name: str) -> None:
    answer(ENTRIES[name].read, b"")  # What is imported at first is not the request's.
    for start, unit, end in ENTRIES[name].known:
        check(name, start + repeated(unit, 4 * LONGEST) + end)

    @given(bodies(name))
    def holds(body: bytes) -> None:
        check(name, body)

    holds()


def test_the_document_has_these_numbers() -> None:
    page = " ".join((ROOT / "docs" / "security.md").read_text().split())
    assert f"{SECONDS} s and {SECONDS_A_BYTE * 1e6:.0f} µs a byte" in page
    assert f"{BYTES >> 20} MiB and {BYTES_A_BYTE} bytes a byte" in page
