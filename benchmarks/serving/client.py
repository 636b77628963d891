"""Generate load: HTTP/1.1 over persistent connections, with little work for each request.

A latency starts when the request was *due*, not when it was sent, so a generator that lags behind makes latencies
longer, never shorter.  :func:`drive` runs in a process of its own, for which nothing heavy is imported.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any

import uvloop

CONNECTION_LOST = "connection lost"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Target:
    port: int  # The port of the server on this machine.
    path: str  # The path to post to.
    content_type: str  # The content type of the bodies.
    bodies: Sequence[bytes]  # Each request carries a random one.
    images: int = 1  # The number of images in each body.


@dataclass(frozen=True)
class Phase:
    seconds: float  # The time in which requests are sent.
    clients: int = 0  # The number of clients in a closed loop; 0 for an open loop.
    per_second: float = 0.0  # The arrivals per second in an open loop.


@dataclass(frozen=True, slots=True)
class Response:
    due: float  # The time when the request was due, seconds of the process's clock.
    seconds: float  # The latency.
    status: int | str  # The HTTP status, or :data:`CONNECTION_LOST`.


@dataclass
class Load:
    began: float
    ended: float
    responses: list[Response] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[str]:
        return Counter(str(response.status) for response in self.responses)

    def seconds(self, status: int = 200) -> list[float]:
        return sorted(response.seconds for response in self.responses if response.status == status)


class Connection:
    """One persistent connection with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def usable(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a whole request, and return status and body of the response."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        body = await self._reader.readexactly(int(header(head, b"content-length") or b"0"))
        return int(head[9:12]), body

    def close(self) -> None:
        self._writer.close()


def header(head: bytes, name: bytes) -> bytes | None:
    _, found, rest = head.lower().partition(b"\r\n" + name + b": ")
    return rest.partition(b"\r\n")[0] if found else None


class Timer:
    """Sleeps by Linux's ``timerfd``, shorter than a millisecond, the resolution of an event loop's timers.

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
        """Wait ``seconds``, more than 0; only one sleep at a time."""
        if self._libc is None:
            await asyncio.sleep(seconds)
            return
        whole, rest = divmod(max(1, int(seconds * 1e9)), 1_000_000_000)
        once = (ctypes.c_long * 4)(0, 0, whole, rest)  # struct itimerspec: no interval, then the time until expiry.
        self._expired = self._loop.create_future()
        if self._libc.timerfd_settime(self._file, 0, once, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await self._expired

    def _expire(self) -> None:
        os.read(self._file, 8)
        if self._expired is not None and not self._expired.done():
            self._expired.set_result(None)


class Generator:
    """Sends requests to one server of this machine."""

    def __init__(self, target: Target, *, seed: int = 0) -> None:
        self._port = target.port
        start = (
            f"POST {target.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {target.content_type}\r\nContent-Length: "
        )
        self._requests = [f"{start}{len(body)}\r\n\r\n".encode() + body for body in target.bodies]
        self._random = random.Random(seed)
        self._idle: list[Connection] = []

    async def get(self, path: str) -> str:
        """Return the body of a GET on a connection of its own."""
        return (await self._once(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()))[1].decode()

    async def post(self) -> tuple[int, bytes]:
        """Return status and body of a POST on a connection of its own."""
        return await self._once(self._requests[0])

    async def _once(self, request: bytes) -> tuple[int, bytes]:
        connection = await self._connect()
        try:
            return await connection.send(request)
        finally:
            connection.close()

    async def closed_loop(self, clients: int, seconds: float) -> Load:
        """Run ``clients``, each of which sends its next request as soon as it has a response."""
        load = Load(clock(), clock() + seconds)

        async def client() -> None:
            while (now := clock()) < load.ended:
                await self._send(load, now)

        await asyncio.gather(*(client() for _ in range(clients)))
        return load

    async def open_loop(self, per_second: float, seconds: float) -> Load:
        """Send Poisson arrivals without waiting for responses, and return after the last response."""
        load = Load(clock(), clock() + seconds)
        due, tasks = load.began, set()
        with Timer() as timer:
            while (due := due + self._random.expovariate(per_second)) < load.ended:
                if (wait := due - clock()) > 0.0:
                    await timer.sleep(wait)
                task = asyncio.create_task(self._send(load, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return load

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _send(self, load: Load, due: float) -> None:
        status: int | str = CONNECTION_LOST
        try:
            connection = await self._connection()
            status, _ = await connection.send(self._random.choice(self._requests))
            self._idle.append(connection)
        except (OSError, EOFError):
            pass
        seconds = clock() - due
        load.responses.append(Response(due, seconds, status))

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        return Connection(*await asyncio.open_connection(HOST, self._port))


def drive(target: Target, phase: Phase) -> dict[str, Any]:
    """Send one phase, wait for all responses, and return the summary."""
    loop = uvloop.new_event_loop()
    gc.collect()
    gc.freeze()
    before = resource.getrusage(resource.RUSAGE_SELF)
    load = loop.run_until_complete(_send(target, phase))
    after = resource.getrusage(resource.RUSAGE_SELF)
    loop.close()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**summary(load, target.images), "client_cpu_s": round(cpu_s, 3)}


def summary(load: Load, images: int = 1) -> dict[str, Any]:
    """Return rates, statuses and latencies of a phase with ``images`` in each request."""
    latencies = load.seconds()
    ended = max((response.due + response.seconds for response in load.responses), default=load.ended)
    seconds = max(load.ended, ended) - load.began
    found: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "requests": len(latencies),
        "statuses": dict(sorted(load.statuses.items())),
        "requests_per_s": round(len(latencies) / seconds, 1),
        "images_per_s": round(images * len(latencies) / seconds, 1),
    }
    if latencies:
        found |= {f"p{percent}_ms": round(1000 * quantile(latencies, percent / 100), 3) for percent in (50, 90, 99)}
    return found


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile of ascending values; infinite if there are none."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("inf")


async def _send(target: Target, phase: Phase) -> Load:
    generator = Generator(target)
    try:
        if phase.clients:
            return await generator.closed_loop(phase.clients, phase.seconds)
        return await generator.open_loop(phase.per_second, phase.seconds)
    finally:
        generator.close()
