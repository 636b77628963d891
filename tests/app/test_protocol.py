"""What a client may send before its request begins, and how slowly; what happens when it does not read its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from app.protocol import MAX_HEAD_BYTES, JoinedWrites, LimitedProtocol, protocol

pytestmark = pytest.mark.anyio

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """As many bytes as the path says, after the body."""
    while (await receive()).get("more_body"):
        pass
    size = int(scope["path"].strip("/") or 2)
    headers = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * size})


@asynccontextmanager
async def serving(patience_s: float) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, ServerState]]:
    """A client's connection to a server of that patience."""
    state = ServerState()
    config = uvicorn.Config(answer, http=protocol(patience_s, lambda: None), log_config=None)
    server = await asyncio.get_running_loop().create_server(lambda: make(config, state), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 16)
    try:
        yield reader, writer, state
    finally:
        writer.close()
        server.close()
        await asyncio.sleep(0.01)


def make(config: uvicorn.Config, state: ServerState) -> LimitedProtocol:
    if not config.loaded:
        config.load()
    made: LimitedProtocol = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg, assignment]
    return made


async def response(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head.split(b"\r\n")[0] + b" " + await reader.readexactly(size)


async def test_requests_in_pieces_and_one_after_the_other() -> None:
    async with serving(5.0) as (reader, writer, _):
        for _ in range(3):
            for byte in REQUEST:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert await response(reader) == b"HTTP/1.1 200 OK xx"
        body = b"y" * (4 * MAX_HEAD_BYTES)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body + REQUEST)
        assert await response(reader) == b"HTTP/1.1 200 OK xx"
        assert await response(reader) == b"HTTP/1.1 200 OK xx"


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.pieces.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 7


async def test_what_is_written_in_one_turn_goes_in_one_piece() -> None:
    below: Any = Transport()
    transport = JoinedWrites(below, asyncio.get_running_loop())
    for data in (b"head", b"body"):
        transport.write(data)
    assert not below.pieces
    assert transport.get_write_buffer_size() == 7 + 8
    await asyncio.sleep(0)
    assert below.pieces == [b"headbody"]
    assert transport.get_write_buffer_size() == 7
    transport.write(b"last")
    transport.close()
    assert below.pieces == [b"headbody", b"last"]
    assert transport.is_closing()
    transport.write(b"too late")
    await asyncio.sleep(0)
    assert below.pieces == [b"headbody", b"last"]


async def test_much_that_is_written_in_one_turn_is_not_held_back() -> None:
    below: Any = Transport()
    transport = JoinedWrites(below, asyncio.get_running_loop())
    for _ in range(9):
        transport.write(b"x" * (1 << 15))
    assert [len(piece) for piece in below.pieces] == [1 << 16] * 4
    await asyncio.sleep(0)
    assert sum(map(len, below.pieces)) == 9 << 15


async def test_head_and_body_of_an_answer_arrive_together() -> None:
    async with serving(5.0) as (reader, writer, _):
        for _ in range(3):
            writer.write(REQUEST)
            answered = await reader.read(1 << 16)
            assert answered.startswith(b"HTTP/1.1 200 OK")
            assert answered.endswith(b"\r\n\r\nxx")


@pytest.mark.parametrize("line", [b"x-a: b\r\n", b"y" * 100], ids=["many headers", "one long header"])
async def test_a_long_head_is_refused(line: bytes) -> None:
    async with serving(5.0) as (reader, writer, state):
        head = REQUEST[:-2] + b"x-long: " + line * MAX_HEAD_BYTES
        writer.write(head[: MAX_HEAD_BYTES - 1])
        await asyncio.sleep(0.1)
        assert state.connections
        writer.write(head[MAX_HEAD_BYTES - 1 : MAX_HEAD_BYTES + 1])
        assert (await response(reader)).startswith(b"HTTP/1.1 431 Request Header Fields Too Large expected at most")
        assert await reader.read() == b""


@pytest.mark.parametrize("sent", [b"", REQUEST[:20], REQUEST + REQUEST[:20]], ids=["nothing", "half", "a second half"])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with serving(0.2) as (reader, writer, state):
        writer.write(sent)
        received = await asyncio.wait_for(reader.read(), 5.0)
        assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")
        assert not state.connections


async def test_a_slow_body_is_not_a_slow_head() -> None:
    async with serving(0.1) as (reader, writer, _):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n")
        for byte in b"12345":
            await asyncio.sleep(0.05)
            writer.write(bytes([byte]))
        assert await response(reader) == b"HTTP/1.1 200 OK xx"


async def test_an_answer_that_nobody_reads_is_dropped_and_a_slow_reader_is_not() -> None:
    size = 32 << 20
    async with serving(0.3) as (reader, writer, state):
        writer.write(REQUEST.replace(b"GET /", b"GET /%d" % size))
        await asyncio.sleep(1.5)
        assert not state.connections
    async with serving(0.3) as (reader, writer, state):
        writer.write(REQUEST.replace(b"GET /", b"GET /%d" % size))
        got = 0
        while got < size:
            got += len(await reader.read(1 << 20))
            await asyncio.sleep(0.02)
        assert state.connections
