"""Run the application under uvicorn, in one process or in uvicorn's own workers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, cast

import uvicorn
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from app.main import check, create_app, end_threads, linger_seconds, prepare_process, settle_heap
from app.metrics import PROCESS_FILES
from app.protocol import LimitedProtocol
from app.service import Host, Service
from app.settings import BACKLOG, Settings
from app.tracing import log_config
from psc_core.errors import ExitCode, UsageError

# The seconds that a worker may take to start in place of another one, or may hang before it is replaced.
_WORKER_TIMEOUT_S = 120
# The free space that a folder must have; a worker's metrics take 1 MiB a type, and more with many classes.
METRICS_BYTES: Final = 64 << 20
logger = logging.getLogger("psc.server")


class UvicornHost(Host):
    """A process that ``psc-serve`` started, in which uvicorn runs."""

    def models_changed(self) -> None:
        settle_heap()
        gc.enable()

    def failed(self) -> None:
        signal.raise_signal(signal.SIGTERM)

    def reloaded(self) -> None:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getppid(), signal.SIGHUP)  # On SIGHUP, uvicorn replaces its workers one after the other.

    @contextlib.contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """Handle signals: SIGHUP reloads; SIGTERM, or the end of a worker's parent, drains and then ends uvicorn.

        Uvicorn closes idle connections as soon as it is told to end, which loses a request already on the wire.  So it
        is told a moment later: until then, ``Connection: close`` and ``/readyz`` send clients elsewhere.
        """
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        end, parent = before[signal.SIGTERM], multiprocessing.parent_process()
        tasks: set[asyncio.Task[None]] = set()

        def drain() -> None:
            service.begin_drain()
            if parent is not None:
                loop.remove_reader(parent.sentinel)
            if callable(end):
                loop.call_later(linger_seconds(service.settings), end, signal.SIGTERM, None)

        def reload() -> None:
            task = loop.create_task(service.reload_quietly())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_signal_handler(signal.SIGTERM, drain)
        loop.add_signal_handler(signal.SIGHUP, reload)
        if parent is not None:
            loop.add_reader(parent.sentinel, drain)
        gc.disable()  # Until the models are loaded: collections would walk what libraries make, which is no garbage.
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            if PROCESS_FILES in os.environ:
                mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]
            gc.enable()
            gc.unfreeze()  # Or libraries would report at exit that their objects have leaked.


def build(settings: Settings) -> FastAPI:
    """Prepare this process and build its application; uvicorn calls this in each worker."""
    prepare_process(settings)
    if multiprocessing.parent_process() is not None:  # A worker, whose code nobody reads once it was told to end.
        atexit.register(end_threads, ExitCode.OK)
    return create_app(settings, host=UvicornHost())


class Workers(Multiprocess):
    """Uvicorn's workers, except that a dead one is noticed at once and that the port closes before they end."""

    def keep_subprocess_alive(self) -> None:
        for worker in self.processes:
            # While the parent holds its copy of the child's end, a dead worker's pipe never reaches EOF, and the parent
            # waits for the whole health check.
            worker.child_conn.close()
            if worker.exitcode == -signal.SIGBUS:
                logger.critical("a worker could not write its metrics: %s is full", os.environ[PROCESS_FILES])
        super().keep_subprocess_alive()

    def terminate_all(self) -> None:
        # The parent's copy of the socket would go on accepting connections that no worker answers.
        for listener in self.sockets:
            listener.close()
        super().terminate_all()


class LastAccepting(uvicorn.Server):
    """Uvicorn's server, except that it answers the connections in the backlog when it ends.

    The kernel has completed their handshakes, so closing the listening socket would reset them.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Nothing is awaited between the last accept and the close, or further connections would arrive in between.
        waiting = [each for listener in sockets or () for each in _accepted(listener)]
        for server in self.servers:
            server.close()
        answering = asyncio.gather(*map(self._answer, waiting))
        await super().shutdown(sockets)
        await answering

    async def _answer(self, connection: socket.socket) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        make = cast(Callable[..., LimitedProtocol], config.http_protocol_class)
        make_protocol = partial(make, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        with contextlib.suppress(OSError):  # The client has left, or its TLS failed.
            _, protocol = await loop.connect_accepted_socket(make_protocol, connection, ssl=config.ssl)
            protocol.shutdown()


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept every connection in the backlog."""
    listener.setblocking(False)
    with contextlib.suppress(OSError):  # The backlog is empty, or no file descriptor is free.
        while True:
            yield listener.accept()[0]


def uvicorn_config(settings: Settings, application: Callable[[], FastAPI]) -> uvicorn.Config:
    """Return the configuration with which uvicorn runs the application."""
    protocol = partial(LimitedProtocol, upload_seconds=settings.upload_seconds)
    return uvicorn.Config(
        application,
        factory=True,
        workers=settings.workers,
        loop="uvloop",
        http=cast(type[LimitedProtocol], protocol),  # Uvicorn wants a class, but only calls it.
        ws="none",
        log_config=log_config(settings.log_level),
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=cast(int, settings.answer_seconds - linger_seconds(settings)),  # It only waits.
        timeout_worker_healthcheck=_WORKER_TIMEOUT_S,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


def serve(settings: Settings, listener: socket.socket) -> tuple[int, str]:
    """Serve until told to stop; return the exit code, and the reason in one line if it is not 0."""
    if settings.workers == 1:
        return _serve_alone(settings, listener)
    check(settings)  # Uvicorn would restart a worker that cannot use its settings for ever.
    config = uvicorn_config(settings, partial(build, settings))
    with tempfile.TemporaryDirectory(prefix="psc-metrics-", dir=metrics_parent()) as folder:
        os.environ.setdefault(PROCESS_FILES, folder)
        workers = Workers(config, [listener])
        workers.run()
    failed = any(worker.exitcode == STARTUP_FAILURE for worker in workers.processes)
    return (ExitCode.BAD_INPUT, "a worker could not start; see the log") if failed else (ExitCode.OK, "")


def metrics_parent(places: Sequence[Path] | None = None) -> Path:
    """Return the first of ``places`` with room for the workers' metrics: by default memory, then the disk.

    The workers map these files, and a process that writes to a mapped file on a full disk is killed (SIGBUS).
    """
    if places is None:
        places = [Path("/dev/shm")]
        with contextlib.suppress(FileNotFoundError):  # No folder for temporary files may be written to.
            places = [*places, Path(tempfile.gettempdir())]
    for place in places:
        if place.is_dir() and os.access(place, os.W_OK) and shutil.disk_usage(place).free >= METRICS_BYTES:
            return place
    raise UsageError(
        f"several workers need {METRICS_BYTES >> 20} MiB for their metrics in {' or '.join(map(str, places))}; free "
        "some space, set TMPDIR to a folder that has it, or serve with --workers 1"
    )


def _serve_alone(settings: Settings, listener: socket.socket) -> tuple[int, str]:
    app = build(settings)
    server = LastAccepting(uvicorn_config(settings, lambda: app))
    try:
        server.run([listener])
    except SystemExit:  # Uvicorn raises a signal again once it has ended, and our handler exits; or startup has failed.
        if not server.started:
            raise
    service: Service = app.state.service
    return service.exit_code, service.exit_message
