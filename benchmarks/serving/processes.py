"""Run a server's processes: start, suspend, resume, terminate, and measure CPU time and memory.  Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.runs import ROOT
from benchmarks.serving.client import Generator, Target

_TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """The server ended or did not answer in time; the message ends with its last output."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """A command and all its descendants in a session of their own, terminated at the end of the ``with`` block.

    Args:
        command: The program and its arguments, run in the repository.
        environment: The whole environment of the process.
        log: The file for its output; by default a temporary one.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        self._log = log.open("w+b") if log else tempfile.TemporaryFile(prefix="psc-benchmark-")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=dict(environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._seen: set[int] = {self._process.pid}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of the command; None if it still runs after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Suspend all processes until :meth:`resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> set[int]:
        """Return the living processes: the command's descendants, the members of its session, and their children."""
        table = _processes()
        while True:
            more = {
                pid
                for pid, (parent, session) in table.items()
                if pid not in self._seen and (parent in self._seen or session == self._process.pid)
            }
            if not more:
                return self._seen & table.keys()
            self._seen |= more

    def cpu_s(self) -> float:
        """Return the user and system time of all living processes so far, seconds."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def memory_mib(self) -> int:
        """Return the resident memory of all processes; shared pages count for each."""
        pages = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    @staticmethod
    def get(port: int, path: str) -> str:
        """Return the body of a GET."""
        return asyncio.run(Generator(Target(port, path, "", [])).get(path))

    def wait_until_ready(self, target: Target, seconds: float = 120.0) -> bytes:
        """Post the first body until the status is 200, and return that response.

        Raises:
            ServerFailed: The command ended or the timeout passed.
        """
        end, last = time.monotonic() + seconds, "no response"
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with code {self._process.returncode}: {self.tail()}")
            try:
                status, body = asyncio.run(_post_once(target))
            except (OSError, EOFError, TimeoutError) as error:
                last = str(error)
            else:
                if status == 200:
                    return body
                last = f"status {status}: {body[:200]!r}"
            time.sleep(0.2)
        raise ServerFailed(f"no 200 within {seconds:g} s, {last}: {self.tail()}")

    def tail(self) -> str:
        """Return the end of the command's output."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 1500))
        return self._log.read().decode(errors="replace").strip()


def scraped(text: str) -> dict[str, float]:
    """Return the metrics of a service with one model, by name and labels without the model's name."""
    text = re.sub(r',?model="[^"]*"', "", text).replace("{,", "{").replace("{} ", " ")
    return {name: float(value) for name, value in re.findall(r"^(psc_\S+) (\S+)$", text, re.MULTILINE)}


def mean_batch(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the mean number of images in a device step between two scrapes; None without a step."""
    images, steps = (after[key] - before[key] for key in ("psc_batch_size_sum", "psc_batch_size_count"))
    return round(images / steps, 2) if steps else None


async def _post_once(target: Target) -> tuple[int, bytes]:
    return await asyncio.wait_for(Generator(target).post(), 30)


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of every process."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return table
