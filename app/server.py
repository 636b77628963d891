"""Uvicorn with a gentle end: SIGTERM stops accepting, answers what was accepted, and exits with our code.

Uvicorn closes idle keep-alive connections the moment it is told to stop; a request that was already on the
wire is then lost.  Here the listening socket is closed first, and for a moment every answer carries
``Connection: close``, so that clients in the middle of a conversation end it themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from app.dispatch import ENDED, READY, RELOAD, Channel
from app.protocol import protocol
from app.service import Service
from app.settings import Settings
from app.sockets import BACKLOG

logger = logging.getLogger("psc.server")

_LINGER_SECONDS = 1.0


class Server(uvicorn.Server):
    """One process's server.

    Args:
        app: From ``create_app``.
        settings: Of the service.
        channel: Where connections come from, in a worker; elsewhere they are accepted on the sockets of :meth:`run`.
    """

    def __init__(self, app: FastAPI, settings: Settings, *, channel: Channel | None = None) -> None:
        tls = settings.tls_certificate is not None
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=protocol(settings.upload_seconds, lambda: self._say(ENDED)),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=settings.access_log,  # What they change, the client's address, is only logged.
                backlog=BACKLOG,
                timeout_keep_alive=settings.keep_alive_seconds,
                ssl_certfile=_text(settings.tls_certificate) if tls else None,
                ssl_keyfile=_text(settings.tls_key) if tls else None,
            )
        )
        self.service: Service = app.state.service
        self.service.on_fatal = self._end
        self.service.on_ready = _settle_heap
        self.service.registry.on_retired = _settle_heap
        self.service.on_reloaded = lambda: self._say(RELOAD)
        self._drain_seconds = settings.drain_seconds
        self._channel = channel
        self.service.load_before_accepting = channel is not None
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept; SIGHUP reloads from now on."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        if self._channel is not None:
            loop.add_reader(self._channel.fileno(), self._receive, self._channel)
            self._say(READY)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, answer what was accepted, end within ``drain_seconds``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        logger.info("draining", extra={"inflight": self.service.inflight})
        self.service.begin_drain()
        if self._channel is not None:
            loop.remove_reader(self._channel.fileno())
            for connection in self._channel.leave():
                self._spawn(self._serve_connection(connection))
        for listener in sockets or []:
            listener.listen(0)
        await asyncio.sleep(0.02)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        linger_until = min(end, loop.time() + _LINGER_SECONDS)
        while self.server_state.connections and loop.time() < linger_until and not self.force_exit:
            await asyncio.sleep(0.01)
        self.config.timeout_graceful_shutdown = max(1, round(end - loop.time()))
        await super().shutdown([])
        gc.unfreeze()  # Or libraries report at exit that their objects have leaked.

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the server; unlike uvicorn's, they are not raised again afterwards."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self) -> None:
        self.should_exit = True

    def _reload(self) -> None:
        self._spawn(self.service.reload_quietly())

    def _receive(self, channel: Channel) -> None:
        news = channel.receive()
        if news is None:  # The supervisor is gone.
            asyncio.get_running_loop().remove_reader(channel.fileno())
            self._end()
            return
        if news.reload:
            self._reload()
        for connection in news.connections:
            self._spawn(self._serve_connection(connection))

    async def _serve_connection(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        make = self.config.http_protocol_class
        options = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: make(**options), connection, ssl=self.config.ssl
            )
        except OSError as error:  # A handshake that failed, or a client that left.
            logger.debug("a connection came to nothing: %s", error)
            connection.close()
            self._say(ENDED)

    def _say(self, word: bytes) -> None:
        if self._channel is not None:
            self._channel.say(word)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle_heap() -> None:
    """Take the objects of imports and models, which stay for good, out of every garbage collection.

    There are hundreds of thousands of them; walking them again and again was two fifths of a request.  Called again
    when a model was replaced: what is frozen is never collected.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
