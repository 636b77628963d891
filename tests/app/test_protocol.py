"""What a client may send before its request begins, and how slowly; what happens when it does not read its answer."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from app.server import MAX_HEAD_BYTES, LimitedProtocol
from tests.app.support import clock, settled

pytestmark = pytest.mark.anyio

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"

GUARD_SECONDS = 30.0  # after this an event that a test waits for counts as missing


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
    timeout_s: float, app: Any = answer, idle_s: float = 5.0, listener: socket.socket | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, ServerState]]:
    """A client's connection to a server that waits for clients so long; none to a listener that the test made."""
    state = ServerState()
    http: Any = partial(LimitedProtocol, upload_seconds=timeout_s)
    config = uvicorn.Config(app, http=http, interface="asgi3", proxy_headers=False, log_config=None)
    config.timeout_keep_alive = idle_s  # type: ignore[assignment]
    config.load()
    listener, is_own = listener or socket.create_server(("127.0.0.1", 0)), listener is None
    server = await asyncio.get_running_loop().create_server(
        lambda: http(config=config, server_state=state, app_state={}), sock=listener
    )
    reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1 << 16) if is_own else (None, None)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            yield reader, writer, state  # type: ignore[misc]
    finally:
        if writer is not None:
            writer.close()
        server.close()
        await asyncio.sleep(0.01)


async def response(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head.split(b"\r\n")[0] + b" " + await reader.readexactly(size)


async def accepted(state: ServerState) -> None:
    """The server has the client's connection; the guard of :func:`serving` ends a wait in vain."""
    while not state.connections:
        await asyncio.sleep(0.001)


async def in_one_read(state: ServerState, data: bytes) -> None:
    """The server's end of the only connection reads these data at once."""
    await accepted(state)
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


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", b"505"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nexpect: 200-ok\r\n\r\n", b"417"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-Continue\r\ncontent-length: 1\r\n\r\n", b"100"),
    ],
)
async def test_heads_that_the_standard_refuses(head: bytes, status: bytes) -> None:
    async with serving(5.0) as (reader, writer, _):
        writer.write(head)
        assert (await reader.readline()).split()[1] == status


@pytest.mark.parametrize("sent", [b"", REQUEST[:20], REQUEST + REQUEST[:20]], ids=["nothing", "half", "a second half"])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with serving(0.5) as (reader, writer, state):
        writer.write(sent)
        received = await reader.read()
        assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")
        assert not state.connections


async def test_a_slow_body_is_not_a_slow_head() -> None:
    async with serving(1.0) as (reader, writer, state):
        await in_one_read(state, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n123")
        with clock() as advance:
            advance(2.0)  # Longer than a head may take.
            await settled()
            assert state.connections
            writer.write(b"45")
            assert await response(reader) == b"HTTP/1.1 200 OK xx"


SIZE = 16 << 20


async def test_an_answer_that_nobody_reads_is_dropped() -> None:
    came = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.set()
        await answer(scope, receive, send)

    async with serving(0.5, app) as (_, writer, state):
        writer.write(REQUEST.replace(b"GET /", b"GET /%d" % SIZE))
        await came.wait()
        while state.connections:
            await asyncio.sleep(0.05)


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


@asynccontextmanager
async def not_reading(timeout_s: float, idle_s: float) -> AsyncIterator[tuple[socket.socket, ServerState]]:
    """A client's connection which holds little between server and client."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    async with serving(timeout_s, idle_s=idle_s, listener=listener) as (_, _, state):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(listener.getsockname())
            client.setblocking(False)
            yield client, state


async def test_a_connection_gets_a_moment_for_its_first_request_when_the_server_ends() -> None:
    async with serving(1000.0, idle_s=1000.0) as (reader, _, state):
        await accepted(state)
        (connection,) = state.connections
        connection.shutdown()
        await in_one_read(state, REQUEST)
        assert await response(reader) == b"HTTP/1.1 200 OK xx"
        connection.shutdown()
        assert await reader.read() == b""
    async with serving(1000.0, idle_s=1000.0) as (reader, _, state):
        await accepted(state)
        next(iter(state.connections)).shutdown()
        assert await reader.read() == b""


STUCK = b"GET /60000 HTTP/1.1\r\nhost: a\r\n\r\n"  # Its answer does not make the transport pause the writer


@pytest.mark.parametrize("end", ["close", "idle", "half closed"])
async def test_a_connection_that_closes_does_not_wait_for_a_client_that_does_not_read(end: str) -> None:
    async with not_reading(1.0, 1.0 if end == "idle" else 1000.0) as (client, state):
        client.send(STUCK.replace(b"host: a", b"connection: close") if end == "close" else STUCK)
        while not (held := [each.transport.get_write_buffer_size() for each in state.connections]) or held == [0]:
            await asyncio.sleep(0.001)
        assert held[0] < 1 << 16
        if end == "half closed":
            client.shutdown(socket.SHUT_WR)
        while state.connections:
            await asyncio.sleep(0.05)


async def test_a_connection_that_closes_waits_for_a_client_that_reads_slowly() -> None:
    async with not_reading(1.0, 1000.0) as (client, _):
        client.send(STUCK.replace(b"host: a", b"connection: close"))
        received = b""
        begun = time.monotonic()
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 12):
            received += piece
            await asyncio.sleep(0.1)
        assert len(received.partition(b"\r\n\r\n")[2]) == 60000
        assert time.monotonic() - begun > 1.0  # Or it was not slow.


LOOPS = pytest.mark.parametrize(
    "anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
"""The service runs on uvloop, which has transports of its own."""

HALF_CLOSED = {
    "one": (REQUEST.replace(b"/", b"/slow", 1), [b"GET "]),
    "HTTP/1.0": (b"POST /slow HTTP/1.0\r\ncontent-length: 3\r\n\r\nxyz", [b"POST xyz"]),
    "chunked": (b"PUT /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", [b"PUT ab"]),
    "several": (REQUEST.replace(b"/", b"/slow", 1) + REQUEST, [b"GET ", b"GET "]),
    "half a head behind it": (REQUEST.replace(b"/", b"/slow", 1) + REQUEST[:20], [b"GET "]),
}


@LOOPS
@pytest.mark.parametrize("kind", HALF_CLOSED)
async def test_a_client_that_closes_its_side_behind_a_whole_request_is_answered(kind: str) -> None:
    sent, bodies = HALF_CLOSED[kind]
    async with serving(GUARD_SECONDS, echo, idle_s=GUARD_SECONDS) as (reader, writer, state):
        writer.write(sent)
        writer.write_eof()
        for body in bodies:
            assert await response(reader) == b"HTTP/1.1 200 OK " + body
        assert await reader.read() == b""
        while state.connections:
            await asyncio.sleep(0.001)


@LOOPS
async def test_an_answer_in_pieces_goes_on_when_the_client_closes_its_side() -> None:
    seen_eof = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await seen_eof.wait()
        await send({"type": "http.response.body", "body": b"cd"})

    async with serving(GUARD_SECONDS, app, idle_s=GUARD_SECONDS) as (reader, writer, state):
        writer.write(REQUEST)
        await reader.readuntil(b"ab")
        (connection,) = state.connections
        writer.write_eof()
        while connection.cycle.keep_alive:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        seen_eof.set()
        assert await reader.read() == b"cd"


async def test_the_refusal_of_a_head_comes_when_the_client_closes_its_side() -> None:
    async with serving(GUARD_SECONDS, echo, idle_s=GUARD_SECONDS) as (reader, writer, _):
        writer.write(b"POST /slow HTTP/1.1\r\ncontent-length: 5\r\n\r\n12345" + b"???\r\n\r\n")
        writer.write_eof()
        assert await response(reader) == b"HTTP/1.1 200 OK POST 12345"
        assert (await response(reader)).startswith(b"HTTP/1.1 400 ")
        assert await reader.read() == b""


@LOOPS
@pytest.mark.parametrize("end", ["half a body", "reset"])
async def test_a_client_that_leaves_is_seen(end: str) -> None:
    messages: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            messages.put_nowait(message["type"])
            if message["type"] == "http.disconnect":
                return

    async with serving(GUARD_SECONDS, app, idle_s=GUARD_SECONDS) as (_, writer, _):
        size = 6 if end == "half a body" else 3
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\nabc" % size)
        assert await messages.get() == "http.request"
        if end == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.write_eof()
        while await messages.get() != "http.disconnect":
            pass


async def write_until_closed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, pause_s: float
) -> None:
    """Write the data again and again until the server ends the connection."""
    ended = asyncio.ensure_future(reader.read())
    while not ended.done():
        writer.write(data)
        await asyncio.wait([ended], timeout=pause_s)
    with suppress(ConnectionResetError):  # which is an end too, of a connection with something unread
        assert await ended == b""


EARLY = b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"


@pytest.mark.parametrize(
    ("upload_s", "idle_s", "sent", "more", "pause_s"),
    [
        (1.0, 1000.0, EARLY, b"a", 0.05),
        (1.0, 1000.0, EARLY, b"a", GUARD_SECONDS),
        (1000.0, 0.5, EARLY + b"a" * 100, b"", GUARD_SECONDS),  # All of it is there before the answer: it is idle.
        (1.0, 1.0, REQUEST, b"\r\n", 0.05),
    ],
    ids=["drops of a body", "no body", "nothing behind a body", "line ends"],
)
async def test_what_does_not_become_a_request_in_time_keeps_no_connection(
    upload_s: float, idle_s: float, sent: bytes, more: bytes, pause_s: float
) -> None:
    """A body that nobody reads must come in time too."""
    async with serving(upload_s, echo, idle_s=idle_s) as (reader, writer, _):
        writer.write(sent)
        assert await response(reader) == b"HTTP/1.1 200 OK " + sent.partition(b" ")[0] + b" "
        await write_until_closed(reader, writer, more, pause_s)


async def test_a_connection_is_kept_when_a_body_that_nobody_reads_has_come() -> None:
    async with serving(5.0, echo, idle_s=1000.0) as (reader, writer, state):
        writer.write(EARLY)
        assert await response(reader) == b"HTTP/1.1 200 OK POST "
        (connection,) = state.connections
        for piece in (b"a" * 50, b"a" * 50):
            await in_one_read(state, piece)
        assert connection.timeout_keep_alive_task is not None  # type: ignore[union-attr]
        with clock() as advance:
            advance(10.0)  # Longer than a body may take.
            await settled()
            writer.write(REQUEST)
            assert await response(reader) == b"HTTP/1.1 200 OK GET "


@LOOPS
async def test_requests_that_wait_for_others_are_not_read_without_limit() -> None:
    many, request = 3000, REQUEST[:-2] + b"x: " + b"y" * 1000 + b"\r\n\r\n"
    most = 0
    async with serving(GUARD_SECONDS, echo) as (reader, writer, state):
        writer.write(request * many)
        for _ in range(many):
            assert await response(reader) == b"HTTP/1.1 200 OK GET "
            most = max(most, *(len(each.pipeline) for each in state.connections))  # type: ignore[union-attr]
    assert 0 < most < 2 * (1 << 18) // len(request)  # What two reads hold.


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
    async with serving(0.5, echo) as (reader, _, state):
        await in_one_read(state, b"POST /slow HTTP/1.1\r\ncontent-length: 5\r\n\r\n12345" + REQUEST + begin)
        for _ in range(2 + MAX_HEAD_BYTES // len(piece)):
            await in_one_read(state, piece)
        assert await response(reader) == b"HTTP/1.1 200 OK POST 12345"
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        assert (await response(reader)).startswith(b"HTTP/1.1 431 ")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (REQUEST[:-2] + b"a: %b\r\n\r\n" % (b"b" * MAX_HEAD_BYTES) + REQUEST, b"431"),
        (REQUEST[:-2] + b"a: b\r\n" * 11000 + b"\r\n" + REQUEST, b"431"),
        (b"GET http://a HTTP/1.1\r\n\r\n", b"400"),
        (b"???\r\n\r\n", b"400"),
        (b"CONNECT / HTTP/1.1\r\n\r\n", b"400"),
    ],
    ids=["one long field", "many fields", "no path", "no method", "a tunnel"],
)
async def test_the_answers_before_a_head_that_is_refused_come(behind: bytes, status: bytes) -> None:
    async with serving(5.0, echo) as (reader, _, state):
        await in_one_read(state, REQUEST + behind)
        assert await response(reader) == b"HTTP/1.1 200 OK GET "
        assert (await response(reader)).startswith(b"HTTP/1.1 %b " % status)
        assert await reader.read() == b""


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
