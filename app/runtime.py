"""The process that hosts the application: its heap, threads and signals, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import torch.compiler.config
from prometheus_client.multiprocess import mark_process_dead

from app.observability.metrics import PROCESS_FILES, forget_dead_processes
from app.service import Host, Service
from app.settings import Settings
from psc_core.compute.allocator import keep_freed_memory, release_freed_memory
from psc_core.images.decode import mute_codecs

LINGER_SECONDS: Final = 1.0
"""After SIGTERM requests are still accepted for so long, each answered with ``Connection: close``."""

_SWITCH_SECONDS: Final = 5e-4
"""Seconds that the event loop may keep the interpreter from the device thread, which wants it between operations."""


_MAX_COMPILED_SHAPES: Final = 1 << 16
"""Shapes compiled in one process: buckets of all models, and of every reload."""


class Runtime(Host):
    """A host that manages its process itself, such as a test or another ASGI server.

    Attributes:
        starts_ready: The application has started only when every model is ready; what goes wrong before is raised.
    """

    starts_ready = False

    @contextlib.contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """Around the life of the application."""
        yield


def prepare_process(settings: Settings) -> None:
    """Set what belongs to the process, not to the application: import path, log, heap, threads, compiler, metrics."""
    if settings.allow_factories:
        sys.path.append(str(Path.cwd()))  # Where they are looked up last.
    logging.captureWarnings(True)
    mute_codecs()
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    torch.set_num_threads(network_threads(settings, torch.get_num_threads()))
    if settings.compile:
        allow_compiled_shapes()
    forget_dead_processes()


def allow_compiled_shapes() -> None:
    """Have ``torch.compile`` keep every batch size of every model; its default of 8 guards against mistakes."""
    torch.compiler.config.recompile_limit = _MAX_COMPILED_SHAPES
    torch.compiler.config.accumulated_recompile_limit = _MAX_COMPILED_SHAPES


class ReplicaRuntime(Runtime):
    """A process whose host starts it, asks for its health and ends it, such as a replica of Ray Serve."""

    starts_ready = True

    def models_changed(self) -> None:
        settle_heap()


class UvicornRuntime(Runtime):
    """A process of our own, in which uvicorn runs."""

    def models_changed(self) -> None:
        settle_heap()

    def failed(self) -> None:
        signal.raise_signal(signal.SIGTERM)

    def reloaded(self) -> None:
        if multiprocessing.parent_process() is not None:  # Uvicorn, which replaces its workers one after the other.
            os.kill(os.getppid(), signal.SIGHUP)

    @contextlib.contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """SIGHUP reloads; SIGTERM drains, and ends uvicorn a moment later; so does the end of a worker's parent.

        Uvicorn closes idle connections when it is told to end, and a request that is already on the wire is lost.  In
        that moment clients learn from ``Connection: close`` and from ``/readyz`` to go elsewhere.
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
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            if PROCESS_FILES in os.environ:
                mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]
            gc.unfreeze()  # Or libraries report at exit that their objects have leaked.


def settle_heap() -> None:
    """Take the objects of imports and models out of every garbage collection, and return what replaced models held.

    There are hundreds of thousands of them, and each full collection would walk them.  What is frozen is never
    collected, hence again when models were replaced.  Their memory would stay with the process (:func:`prepare_process`
    keeps it for the next batch) in holes that a large tensor of the next model may not fit.
    """
    gc.unfreeze()
    gc.collect()
    release_freed_memory()
    gc.freeze()


def linger_seconds(settings: Settings) -> float:
    """Return for how many seconds requests are still accepted after SIGTERM."""
    return min(LINGER_SECONDS, settings.drain_seconds / 2)


def network_threads(settings: Settings, default: int) -> int:
    """PyTorch's threads in one of the workers, where PyTorch alone would take ``default``."""
    return settings.threads or max(1, default // settings.workers)
