"""A load generator for one URL: HTTP/1.1 over kept-alive connections, as little work a request as Python allows.

Its latencies start when a request was *due*, not when it was sent, so a generator that lags behind makes them
longer, never shorter.
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
class Answer:
    """One request: when it was due (seconds of the process's clock), how long its answer took, and what it was."""

    due: float
    seconds: float
    status: int | str
    retry_after: str | None


@dataclass
class Load:
    """What a phase sent and got.

    Attributes:
        answers: In the order in which they came.
        began, ended: Time of the first and the last request being due.
    """

    began: float
    ended: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[str]:
        """Answers by status."""
        return Counter(str(answer.status) for answer in self.answers)

    def seconds(self, status: int = 200) -> list[float]:
        """Latencies of one status, ascending."""
        return sorted(answer.seconds for answer in self.answers if answer.status == status)


class Connection(asyncio.Protocol):
    """One kept-alive connection that carries one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        """Whether the server still listens on it."""
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed it."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed before the answer"))
        self.transport = None

    def data_received(self, data: bytes) -> None:
        """Collect bytes until the head and ``Content-Length`` bytes of body are there."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._answer is None or self._answer.done():
            return
        if len(body) >= int(header(head, b"content-length") or b"0"):
            self._received = b""
            self._answer.set_result((int(head[9:12]), head, body))

    async def send(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Status, head and body of the answer to a whole request."""
        if self.transport is None:
            raise ConnectionResetError("closed before the request")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answer


def header(head: bytes, name: bytes) -> bytes | None:
    """A header's value."""
    _, found, rest = head.lower().partition(b"\r\n" + name + b": ")
    return rest.partition(b"\r\n")[0] if found else None


class Alarm:
    """Sleeps of well under a millisecond, the resolution of an event loop's own timers, by Linux's ``timerfd``.

    Polling the clock instead would take most of a core from the server.  Elsewhere the loop's timers have to do.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._file = -1
        self._rung: asyncio.Future[None] | None = None

    def __enter__(self) -> Alarm:
        if self._libc is not None:
            self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._file < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create failed")
            self._loop.add_reader(self._file, self._ring)
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
        self._rung = self._loop.create_future()
        if self._libc.timerfd_settime(self._file, 0, once, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await self._rung

    def _ring(self) -> None:
        os.read(self._file, 8)
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)


class Generator:
    """Sends requests to one server.

    Args:
        host, port: Of the server.
        bodies: Each request carries a random one.
        path: That they are posted to.
        content_type: Of the bodies.
        seed: Of the choice of bodies and of the arrivals.
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
        """``clients`` that each send the next request as soon as they have an answer."""
        load = Load(clock(), clock() + seconds)

        async def client() -> None:
            while (now := clock()) < load.ended:
                await self._send(load, now)

        await asyncio.gather(*(client() for _ in range(clients)))
        return load

    async def open_loop(self, per_second: float, seconds: float, *, sent: asyncio.Event | None = None) -> Load:
        """Poisson arrivals that wait for nobody; returns when the last answer is there, ``sent`` tells of the last
        arrival."""
        load = Load(clock(), clock() + seconds)
        due, tasks = load.began, set()
        with Alarm() as alarm:
            while (due := due + self._random.expovariate(per_second)) < load.ended:
                if (wait := due - clock()) > 0.0:
                    await alarm.sleep(wait)
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
        load.answers.append(Answer(due, seconds, status, wait.decode() if wait else None))

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
