"""A load generator for one URL: HTTP/1.1 over persistent connections with little work for each request.

Latencies start when a request was *due*, not when it was sent, so a generator that lags behind makes them longer,
never shorter.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock

CONNECTION_LOST = "connection lost"


@dataclass(frozen=True, slots=True)
class Response:
    """Response to one request.

    Attributes:
        due: When the request was due, seconds of the process's clock.
        seconds: Latency.
        status: HTTP status, or :data:`CONNECTION_LOST`.
        retry_after: Header of a 429.
    """

    due: float
    seconds: float
    status: int | str
    retry_after: str | None


@dataclass
class Load:
    """Requests of a phase and their responses.

    Attributes:
        began, ended: When the first request was due, and when no further one is.
        responses: In the order of arrival.
    """

    began: float
    ended: float
    responses: list[Response] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[str]:
        """Number of responses by status."""
        return Counter(str(response.status) for response in self.responses)

    def seconds(self, status: int = 200) -> list[float]:
        """Latencies of one status, ascending."""
        return sorted(response.seconds for response in self.responses if response.status == status)


class Connection(asyncio.Protocol):
    """One persistent connection with one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._response: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        """Whether it is still open."""
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending request."""
        if self._response is not None and not self._response.done():
            self._response.set_exception(exc or ConnectionResetError("closed before the response"))
        self.transport = None

    def data_received(self, data: bytes) -> None:
        """Collect bytes until head and body (``Content-Length``) are complete."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._response is None or self._response.done():
            return
        if len(body) >= int(header(head, b"content-length") or b"0"):
            self._received = b""
            self._response.set_result((int(head[9:12]), head, body))

    async def send(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Send a whole request; returns status, head and body of the response."""
        if self.transport is None:
            raise ConnectionResetError("closed before the request")
        self._response = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._response


def header(head: bytes, name: bytes) -> bytes | None:
    """A header's value."""
    _, found, rest = head.lower().partition(b"\r\n" + name + b": ")
    return rest.partition(b"\r\n")[0] if found else None


class Timer:
    """Sleeps shorter than a millisecond (the resolution of event-loop timers) by Linux's ``timerfd``.

    Polling the clock instead would take most of a core from the server.  Other systems use the loop's timers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._file = -1
        self._expired: asyncio.Future[None] | None = None

    def __enter__(self) -> Timer:
        if self._libc is not None:
            self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._file < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create failed")
            self._loop.add_reader(self._file, self._expire)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)

    async def sleep(self, seconds: float) -> None:
        """Wait ``seconds``, more than 0; one sleep at a time."""
        if self._libc is None:
            await asyncio.sleep(seconds)
            return
        whole, rest = divmod(max(1, int(seconds * 1e9)), 1_000_000_000)
        once = (ctypes.c_long * 4)(0, 0, whole, rest)  # struct itimerspec: no interval, then the time to go
        self._expired = self._loop.create_future()
        if self._libc.timerfd_settime(self._file, 0, once, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await self._expired

    def _expire(self) -> None:
        os.read(self._file, 8)
        if self._expired is not None and not self._expired.done():
            self._expired.set_result(None)


class Generator:
    """Sends requests to one server.

    Args:
        host, port: Of the server.
        bodies: Each request carries a random one.
        path: To post them to.
        content_type: Of the bodies.
        seed: Of bodies and arrivals.
    """

    def __init__(
        self,
        host: str,
        port: int,
        bodies: Sequence[bytes],
        *,
        path: str = "/predict",
        content_type: str = "image/png",
        seed: int = 0,
    ) -> None:
        self._host, self._port = host, port
        start = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {content_type}\r\nContent-Length: "
        self._requests = [f"{start}{len(body)}\r\n\r\n".encode() + body for body in bodies]
        self._random = random.Random(seed)
        self._idle: list[Connection] = []

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET on a connection of its own."""
        connection = await self._connect()
        try:
            status, _, body = await connection.send(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())
            return status, body.decode()
        finally:
            self._close(connection)

    async def post(self) -> tuple[int, bytes]:
        """Status and body of one POST on a connection of its own."""
        connection = await self._connect()
        try:
            status, _, body = await connection.send(self._random.choice(self._requests))
            return status, body
        finally:
            self._close(connection)

    async def closed_loop(self, clients: int, seconds: float) -> Load:
        """``clients`` that each send the next request as soon as they have a response."""
        load = Load(clock(), clock() + seconds)

        async def client() -> None:
            while (now := clock()) < load.ended:
                await self._send(load, now)

        await asyncio.gather(*(client() for _ in range(clients)))
        return load

    async def open_loop(self, per_second: float, seconds: float, *, sent: asyncio.Event | None = None) -> Load:
        """Poisson arrivals that wait for no response; returns after the last response.

        ``sent`` is set after the last arrival.
        """
        load = Load(clock(), clock() + seconds)
        due, tasks = load.began, set()
        with Timer() as timer:
            while (due := due + self._random.expovariate(per_second)) < load.ended:
                if (wait := due - clock()) > 0.0:
                    await timer.sleep(wait)
                task = asyncio.create_task(self._send(load, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        if sent is not None:
            sent.set()
        await asyncio.gather(*tasks)
        return load

    def close(self) -> None:
        """Close every connection."""
        while self._idle:
            self._close(self._idle.pop())

    async def _send(self, load: Load, due: float) -> None:
        status: int | str = CONNECTION_LOST
        wait = None
        try:
            connection = await self._connection()
            status, head, _ = await connection.send(self._random.choice(self._requests))
            wait = header(head, b"retry-after") if status == 429 else None
            self._idle.append(connection)
        except OSError:
            pass
        seconds = clock() - due
        load.responses.append(Response(due, seconds, status, wait.decode() if wait else None))

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port)
        return connection

    @staticmethod
    def _close(connection: Connection) -> None:
        if connection.transport is not None:
            connection.transport.close()
