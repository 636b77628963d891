"""What a client may send before its request begins, and how slowly; what happens when it does not read its answer."""

from __future__ import annotations

import asyncio
import socket
import time
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


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """The method and the body, in 0.2 s where the path is ``/slow``, and without the body where it is ``/early``."""
    body = scope["method"].encode() + b" "
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(
    patience_s: float, app: Any = answer, idle_s: float = 5.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, ServerState]]:
    """A client's connection to a server of that patience."""
    state = ServerState()
    config = uvicorn.Config(app, http=protocol(patience_s, lambda: None), log_config=None)
    config.timeout_keep_alive = idle_s  # type: ignore[assignment]
    server = await asyncio.get_running_loop().create_server(lambda: make(config, state), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 16)
    try:
        async with asyncio.timeout(10.0):
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


async def in_one_read(state: ServerState, data: bytes) -> None:
    """The server's end of the only connection reads these data at once."""
    while not state.connections:
        await asyncio.sleep(0.001)
    (connection,) = state.connections
    connection.data_received(data)  # type: ignore[union-attr]


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
    transport = JoinedWrites(below, asyncio.get_running_loop(), lambda: None)
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
    transport = JoinedWrites(below, asyncio.get_running_loop(), lambda: None)
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


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
"""What Java's client sends with its first request."""

OFFERING = [
    (b"POST / HTTP/1.1\r\nhost: a\r\n" + OFFER + b"content-length: 5\r\n\r\n12345", b"POST 12345"),
    (b"GET / HTTP/1.1\r\n" + OFFER + b"\r\n", b"GET "),
    (b"PUT / HTTP/1.1\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"PUT abc"),
    (REQUEST, b"GET "),
    (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nUPGRADE: websocket\r\n\r\n", b"GET "),
    (b"POST / HTTP/1.1\r\nconnection: Upgrade, close\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nxyz", b"POST xyz"),
]


@pytest.mark.parametrize("piece", [1, 7, 1 << 16], ids=lambda size: f"pieces of {size}")
async def test_an_offer_of_another_protocol_is_ignored(piece: int) -> None:
    async with serving(5.0, echo) as (reader, _, state):
        stream = b"".join(request for request, _ in OFFERING)
        for begin in range(0, len(stream), piece):
            await in_one_read(state, stream[begin : begin + piece])
        for _, body in OFFERING:
            assert await response(reader) == b"HTTP/1.1 200 OK " + body
        assert await reader.read() == b""


async def test_an_offer_of_another_protocol_whose_body_comes_later() -> None:
    async with serving(5.0, echo) as (reader, writer, _):
        for body in (b"12345", b""):
            head = b"POST / HTTP/1.1\r\nhost: a\r\n" + OFFER + b"content-length: %d\r\n\r\n" % len(body)
            writer.write(head)
            await asyncio.sleep(0.05)
            writer.write(body)
            assert await response(reader) == b"HTTP/1.1 200 OK POST " + body


async def test_an_offer_in_http_1_0() -> None:
    async with serving(5.0, echo) as (reader, writer, _):
        writer.write(b"POST / HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nxyz")
        assert await response(reader) == b"HTTP/1.1 200 OK POST xyz"
        assert await reader.read() == b""


@pytest.mark.parametrize("target", [b"a:443", b"/"])
async def test_a_tunnel_is_refused(target: bytes) -> None:
    async with serving(5.0, echo) as (reader, writer, _):
        writer.write(b"CONNECT %s HTTP/1.1\r\nhost: a\r\n\r\n" % target + REQUEST)
        assert await response(reader) == b"HTTP/1.1 400 Bad Request Invalid HTTP request received."
        assert await reader.read() == b""


@asynccontextmanager
async def not_reading(patience_s: float, idle_s: float) -> AsyncIterator[tuple[socket.socket, ServerState]]:
    """A client's connection which holds little between server and client."""
    state = ServerState()
    config = uvicorn.Config(answer, http=protocol(patience_s, lambda: None), log_config=None)
    config.timeout_keep_alive = idle_s  # type: ignore[assignment]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    server = await asyncio.get_running_loop().create_server(lambda: make(config, state), sock=listener)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    client.connect(listener.getsockname())
    client.setblocking(False)
    try:
        async with asyncio.timeout(10.0):
            yield client, state
    finally:
        client.close()
        server.close()
        await asyncio.sleep(0.01)


STUCK = b"GET /60000 HTTP/1.1\r\nhost: a\r\n\r\n"
"""Its answer does not make the transport pause the writer."""


@pytest.mark.parametrize("end", ["close", "idle", "half closed"])
async def test_a_connection_that_closes_does_not_wait_for_a_client_that_does_not_read(end: str) -> None:
    async with not_reading(0.2, 0.1 if end == "idle" else 5.0) as (client, state):
        client.send(STUCK.replace(b"host: a", b"connection: close") if end == "close" else STUCK)
        await asyncio.sleep(0.1)
        (connection,) = state.connections
        assert 0 < connection.transport.get_write_buffer_size() < 1 << 16
        if end == "half closed":
            client.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.6)
        assert not state.connections


async def test_a_connection_that_closes_waits_for_a_client_that_reads_slowly() -> None:
    async with not_reading(0.2, 5.0) as (client, _):
        client.send(STUCK.replace(b"host: a", b"connection: close"))
        received = b""
        begun = time.monotonic()
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 12):
            received += piece
            await asyncio.sleep(0.05)
        assert len(received.partition(b"\r\n\r\n")[2]) == 60000
        assert time.monotonic() - begun > 0.4


async def seconds_of_writing(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, pause_s: float
) -> float:
    """How long the server takes these data again and again before it ends the connection, which it must within 1 s."""
    ended = asyncio.ensure_future(reader.read())
    begun = time.monotonic()
    while not ended.done() and time.monotonic() - begun < 1.0:
        writer.write(data)
        await asyncio.wait([ended], timeout=min(pause_s, 1.0))
    assert ended.done()
    return time.monotonic() - begun


EARLY = b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"


@pytest.mark.parametrize("pause_s", [0.05, 5.0], ids=["drops", "nothing"])
async def test_a_body_that_nobody_reads_must_come_in_time(pause_s: float) -> None:
    async with serving(0.3, echo, idle_s=2.0) as (reader, writer, _):
        writer.write(EARLY)
        assert await response(reader) == b"HTTP/1.1 200 OK POST "
        assert await seconds_of_writing(reader, writer, b"a", pause_s) > 0.2


async def test_a_body_that_nobody_reads_ends_and_the_connection_is_idle() -> None:
    async with serving(0.2, echo, idle_s=0.4) as (reader, writer, _):
        writer.write(EARLY)
        assert await response(reader) == b"HTTP/1.1 200 OK POST "
        for piece in (b"a" * 50, b"a" * 50):
            await asyncio.sleep(0.05)
            writer.write(piece)
        await asyncio.sleep(0.3)
        writer.write(REQUEST)
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        begun = time.monotonic()
        writer.write(EARLY + b"a" * 100)  # All of it is there before the answer.
        assert await response(reader) == b"HTTP/1.1 200 OK POST "
        assert await asyncio.wait_for(reader.read(), 2.0) == b""
        assert time.monotonic() - begun > 0.3


async def test_line_ends_between_requests_do_not_keep_a_connection() -> None:
    async with serving(0.3, idle_s=0.3) as (reader, writer, _):
        writer.write(REQUEST)
        assert await response(reader) == b"HTTP/1.1 200 OK xx"
        await seconds_of_writing(reader, writer, b"\r\n", 0.05)


@pytest.mark.parametrize("cut", [1, 3, 5, len(REQUEST) - 1])
async def test_a_head_that_begins_behind_much_else_is_not_long(cut: int) -> None:
    body = b"POST / HTTP" * (MAX_HEAD_BYTES // 4)
    async with serving(5.0, echo) as (reader, _, state):
        await in_one_read(state, b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body + REQUEST[:cut])
        await in_one_read(state, REQUEST[cut:])
        assert await response(reader) == b"HTTP/1.1 200 OK POST " + body
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
    many = 1 + MAX_HEAD_BYTES // len(REQUEST)
    async with serving(5.0, echo) as (reader, _, state):
        await in_one_read(state, REQUEST * many + REQUEST[:cut])
        await in_one_read(state, REQUEST[cut:])
        for _ in range(many + 1):
            assert await response(reader) == b"HTTP/1.1 200 OK GET "


ENDLESS = {
    "spaces": (b"GET ", b" " * 100),
    "target": (b"GET ", b"/" * 100),
    "header": (b"GET / HTTP/1.1\r\nhost: ", b"a" * 100),
    "headers": (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 20),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_endless_head_is_refused_and_the_answers_before_it_come(kind: str) -> None:
    begin, piece = ENDLESS[kind]
    async with serving(0.1, echo) as (reader, _, state):
        await in_one_read(state, b"POST /slow HTTP/1.1\r\ncontent-length: 5\r\n\r\n12345" + REQUEST + begin)
        for _ in range(2 + MAX_HEAD_BYTES // len(piece)):
            await in_one_read(state, piece)
        assert await response(reader) == b"HTTP/1.1 200 OK POST 12345"
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        assert (await response(reader)).startswith(b"HTTP/1.1 431 ")
        assert await reader.read() == b""


@pytest.mark.parametrize("fields", [b"a: %b\r\n" % (b"b" * MAX_HEAD_BYTES), b"a: b\r\n" * 11000], ids=["one", "many"])
async def test_a_long_head_that_comes_whole_is_refused(fields: bytes) -> None:
    async with serving(5.0, echo) as (reader, _, state):
        await in_one_read(state, REQUEST + REQUEST[:-2] + fields + b"\r\n" + REQUEST)
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        assert (await response(reader)).startswith(b"HTTP/1.1 431 ")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "wrong",
    [b"GET http://a HTTP/1.1\r\n\r\n", b"???\r\n\r\n", b"CONNECT / HTTP/1.1\r\n\r\n"],
    ids=["no path", "no method", "a tunnel"],
)
async def test_the_answers_before_what_is_not_http_come(wrong: bytes) -> None:
    async with serving(5.0, echo) as (reader, _, state):
        await in_one_read(state, REQUEST + wrong)
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        assert (await response(reader)).startswith(b"HTTP/1.1 400 ")
        assert await reader.read() == b""


async def test_an_answer_is_not_lost_when_the_next_head_does_not_come() -> None:
    async with serving(0.1, echo) as (reader, writer, _):
        writer.write(REQUEST.replace(b"/", b"/slow", 1) + REQUEST[:20])
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        assert await asyncio.wait_for(reader.read(), 1.0) == b""


CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"


@pytest.mark.parametrize("rest", [b"0\r\nx: ", b"0\r\n", b"3;x="], ids=["value", "fields", "extension"])
async def test_endless_bytes_of_a_body_that_are_not_its_content_are_refused(rest: bytes) -> None:
    async with serving(5.0, echo) as (reader, writer, state):
        more = b"a: b\r\n" * 1000 if rest == b"0\r\n" else b"a" * 6000
        writer.write(CHUNKED + rest)
        sent = 0
        while state.connections or not sent:
            writer.write(more)
            sent += len(more)
            await asyncio.sleep(0.001)
        assert MAX_HEAD_BYTES < sent < 8 * MAX_HEAD_BYTES
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


async def test_trailers_are_not_headers_and_small_chunks_are_content() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        seen.extend(scope["headers"])

    async with serving(5.0, app) as (reader, writer, _):
        writer.write(CHUNKED)
        for _ in range(20):
            writer.write(b"1;x=y\r\nd\r\n" * 1000)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\nx-late: 1\r\n\r\n" + REQUEST)
        assert await response(reader) == b"HTTP/1.1 200 OK POST abc" + b"d" * 20_000
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
    assert seen == [(b"host", b"a"), (b"transfer-encoding", b"chunked"), (b"host", b"a")]
