"""Run named checks one after another in a process of their own, and go on after failures, hangs and crashes.

An error of a GPU can end its process or leave it useless, so a check that raises, dies or takes too long costs the
others only a new process.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

Check = Callable[[torch.device], str]
"""Returns what to note; raises an exception, or :class:`Skipped`."""

NEEDS_CUDA = "needs CUDA"
STARTING_SECONDS = 120.0
"""Added for the first check of a process, which imports and creates the CUDA context."""


class Skipped(Exception):
    """A check that this device cannot run, and why."""


class Outcome(NamedTuple):
    """What came of a check."""

    state: str  # "passed", "failed" or "skipped"
    seconds: float
    note: str  # or the first line of the error
    trace: str = ""


def needs_cuda(device: torch.device) -> None:
    """Skip the check on a CPU."""
    if device.type != "cuda":
        raise Skipped(NEEDS_CUDA)


def outcome_of(check: Check, device: torch.device) -> Outcome:
    """Run a check here."""
    began = time.perf_counter()
    try:
        state, note, trace = "passed", check(device), ""
    except Skipped as reason:
        state, note, trace = "skipped", str(reason), ""
    except Exception as error:
        state, note, trace = "failed", first_line(error), traceback.format_exc()
    return Outcome(state, round(time.perf_counter() - began, 1), note, trace)


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


class Worker:
    """A process that runs checks.

    Args:
        checks: By name; functions at the top of a module.
        device: Handed to each.
    """

    def __init__(self, checks: Mapping[str, Check], device: torch.device) -> None:
        self._checks, self._device = checks, device
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, name: str, seconds: float) -> Outcome:
        """The outcome of a check, in a new process after one that failed."""
        if self._process is None:
            self._start()
            seconds += STARTING_SECONDS
        assert self._pipe is not None and self._process is not None
        began = time.perf_counter()
        self._pipe.send(name)
        if not self._pipe.poll(seconds):
            outcome = Outcome("failed", round(time.perf_counter() - began, 1), f"no result after {seconds:.0f} s")
        else:
            try:
                outcome = self._pipe.recv()
            except EOFError:
                self._process.join(10)
                note = f"its process ended with {self._process.exitcode}"
                outcome = Outcome("failed", round(time.perf_counter() - began, 1), note)
        if outcome.state == "failed":
            self.close()
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(self._checks), self._device))
        self._process.start()
        theirs.close()


def _serve(pipe: Connection, checks: Mapping[str, Check], device: torch.device) -> None:
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(outcome_of(checks[name], device))
