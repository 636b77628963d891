"""Several processes behind one listening socket: start them, replace those that die, share out connections.

A child is the same command with the number of its channel (:mod:`app.dispatch`) in the environment.  A child that
dies is replaced, after a pause that doubles while it keeps dying young.  One that ends with code 2 (bad input) ends
them all, because its replacement would end the same way; but not while another answers, with what it read before.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final

from prometheus_client.multiprocess import mark_process_dead

from app.dispatch import Dispatcher, inherit

logger = logging.getLogger("psc.supervisor")

_METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
_BAD_INPUT: Final = 2
_YOUNG_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1


class Supervisor:
    """Keeps ``workers`` children alive until SIGTERM or SIGINT.

    Args:
        command: Of a child.
        listener: What the service listens on.
        workers: How many.
        drain_seconds: How long children may take to end.
    """

    def __init__(self, command: Sequence[str], listener: socket.socket, *, workers: int, drain_seconds: float) -> None:
        self._command = list(command)
        self._dispatcher = Dispatcher(listener)
        self._workers = workers
        self._drain_seconds = drain_seconds
        self._children: list[subprocess.Popen[bytes] | None] = [None] * workers
        self._started = [0.0] * workers
        self._not_before = [0.0] * workers
        self._pauses = [0.0] * workers
        self._ending = False
        self._reload = False

    def run(self) -> int:
        """Supervise; returns the exit code."""
        with tempfile.TemporaryDirectory(prefix="psc-metrics-") as folder:
            os.environ.setdefault(_METRICS_VARIABLE, folder)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._end)
            signal.signal(signal.SIGHUP, self._hang_up)
            code = 0
            while not self._ending and code == 0:
                code = self._tend()
                self._dispatcher.turn(_POLL_SECONDS)
                if self._reload:
                    self._reload = False
                    self._dispatcher.reload()
            self._end_children()
            return code

    def _tend(self) -> int:
        """Start what is missing, bury what died; a code other than 0 ends the service."""
        now = time.monotonic()
        for slot, child in enumerate(self._children):
            if child is None:
                if now >= self._not_before[slot]:
                    self._start(slot)
            elif child.poll() is not None:
                mark_process_dead(child.pid)  # type: ignore[no-untyped-call]
                self._children[slot] = None
                refused = child.returncode == _BAD_INPUT
                if refused and not self._dispatcher.ready:
                    return _BAD_INPUT
                young = refused or now - self._started[slot] < _YOUNG_SECONDS
                pause = min(_LONGEST_PAUSE_SECONDS, max(0.1, self._pauses[slot] * 2)) if young else 0.0
                self._pauses[slot], self._not_before[slot] = pause, now + pause
                logger.error("a worker died", extra={"pid": child.pid, "exit_code": child.returncode})
        return 0

    def _start(self, slot: int) -> None:
        with self._dispatcher.add() as end:
            self._children[slot] = subprocess.Popen(
                self._command, env={**os.environ, **inherit(end)}, pass_fds=[end.fileno()]
            )
        self._started[slot] = time.monotonic()

    def _hang_up(self, number: int, frame: object) -> None:
        self._reload = True

    def _end(self, number: int, frame: object) -> None:
        self._ending = True

    def _end_children(self) -> None:
        self._dispatcher.close()
        for child in self._children:
            if child is not None and child.poll() is None:
                child.terminate()
        end = time.monotonic() + self._drain_seconds + 2.0
        for child in self._children:
            if child is None:
                continue
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("a worker did not end in time and is killed", extra={"pid": child.pid})
                child.kill()
                child.wait()


def child_command(arguments: Sequence[str]) -> list[str]:
    """The command of a child with the parent's arguments."""
    return [sys.executable, "-m", "app.cli", *arguments]
