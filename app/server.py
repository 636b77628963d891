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
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from app.protocol import protocol
from app.service import Service
from app.settings import Settings
from app.sockets import BACKLOG, supervisor_is_gone

logger = logging.getLogger("psc.server")

_LINGER_SECONDS = 1.0


class Server(uvicorn.Server):
    """One process's server.

    Args:
        app: From ``create_app``.
        settings: Of the service.
        shared_socket: Other processes accept on the same socket.
    """

    def __init__(self, app: FastAPI, settings: Settings, *, shared_socket: bool) -> None:
        tls = settings.tls_certificate is not None
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=protocol(settings.upload_seconds),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
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
        self._drain_seconds = settings.drain_seconds
        self._shared_socket = shared_socket
        self.service.load_before_accepting = shared_socket
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept; SIGHUP reloads from now on."""
        await super().startup(sockets)
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn's tenth-of-a-second tick: a worker whose supervisor is gone ends."""
        if supervisor_is_gone():
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, answer what was accepted, end within ``drain_seconds``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        logger.info("draining", extra={"inflight": self.service.inflight})
        self.service.begin_drain()
        if not self._shared_socket:
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
        task = asyncio.get_running_loop().create_task(self.service.reload_quietly())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


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
