"""A service that an attack meets, in a control group whose memory is limited, and what came of it."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from app.memory import CGROUPS
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import is_ready

EXAMPLE = (SHIPPED_BUNDLE / "examples" / "clean.png").read_bytes()
STALL_SECONDS = 1.0  # How long /healthz may wait at most

Status = int | str  # of an answer, or the name of the error in its place

LIMIT_MIB = 4096  # Memory of a service: so a container may have been given


class Seen(NamedTuple):
    """What came of an attack."""

    now: str
    is_wanted: bool | None  # None: it was not tried.


class Started(NamedTuple):
    """A service that answers."""

    url: str
    pid: int
    group: Path | None = None  # with its limit

    @property
    def is_limited(self) -> bool:
        """Whether it is in a control group."""
        return self.group is not None

    def was_killed(self) -> bool:
        """Whether the kernel has killed something in its group because memory ended."""
        files = ("memory.oom_control", "memory.events")
        lines = [
            line for name in files if (file := self._file(name)).exists() for line in file.read_text().splitlines()
        ]
        return any(line.startswith("oom_kill ") and int(line.split()[1]) for line in lines)

    @contextmanager
    def neighbours(self, count: int, mib: int) -> Iterator[None]:
        """Meanwhile, processes in its group that hold so much memory each."""
        joins = f'echo $$ > {self.group}/cgroup.procs; exec "$@"'
        holds = f"import time; held = bytearray(b'x') * ({mib} << 20); time.sleep(600)"
        words = ["bash", "-c", joins, "neighbour", sys.executable, "-c", holds]
        started = [subprocess.Popen(words) for _ in range(count)]
        try:
            yield
        finally:
            for process in started:
                process.kill()
                process.wait()

    def _file(self, name: str) -> Path:
        assert self.group is not None
        return self.group / name

    def peak_bytes(self) -> int:
        """The most memory that its processes ever had, if they had it at one time."""
        return self.resident_bytes() + sum(_read(each, "VmHWM:") - _read(each, "VmRSS:") for each in self._processes())

    def resident_bytes(self) -> int:
        """The memory that its processes have; what several share counts once."""
        return sum(_read(each, "Pss:", "smaps_rollup") for each in self._processes())

    def _processes(self) -> list[str]:
        return [str(self.pid), *Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


def _read(pid: str, name: str, file: str = "status") -> int:
    return 1024 * int(Path(f"/proc/{pid}/{file}").read_text().partition(name)[2].split()[0])


@contextmanager
def group(mib: int) -> Iterator[Path | None]:
    """A control group with a limit; none where none may be made."""
    version_1 = (CGROUPS / "memory").is_dir()
    try:
        folder = Path(tempfile.mkdtemp(prefix="psc-attack-", dir=CGROUPS / ("memory" if version_1 else "")))
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(mib << 20))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        while (folder / "cgroup.procs").read_text():
            time.sleep(0.1)
        folder.rmdir()


@contextmanager
def service(*flags: str, stderr: str = os.devnull, shell: str = ":", memory_mib: int = LIMIT_MIB) -> Iterator[Started]:
    """The shipped bundle, ready to answer, after a command of the shell that starts it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "app.cli", "--bundle", str(SHIPPED_BUNDLE), "--port", str(port), *flags]
    with group(memory_mib) as folder, Path(stderr).open("w") as log:
        joins = "" if folder is None else f"echo $$ > {folder}/cgroup.procs;"
        words = ["bash", "-c", f'{joins} {shell}; exec "$@"', "psc-serve", *words]
        with subprocess.Popen(words, cwd=ROOT, stderr=log) as process:
            url = f"http://127.0.0.1:{port}"
            try:
                while not is_ready(url):
                    if process.poll() is not None:
                        raise RuntimeError(f"the service ended with {process.returncode}")
                    time.sleep(0.1)
                yield Started(url, process.pid, folder)
            finally:
                process.terminate()


@contextmanager
def longest_stall(url: str) -> Iterator[list[float]]:
    """Meanwhile, the longest time that ``/healthz`` took, seconds, once the block has ended.

    It is infinite if one answer was not 200, or did not come.
    """
    ended, longest = threading.Event(), [math.inf]

    def ask() -> None:
        seen = 0.0
        with httpx.Client(timeout=120) as client, suppress(httpx.HTTPError):
            while True:
                began = time.perf_counter()
                if client.get(f"{url}/healthz").status_code != 200:
                    return
                seen = max(seen, time.perf_counter() - began)
                if ended.wait(0.01):
                    break
            longest[0] = seen

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()


def ask(url: str, path: str = "/predict", **request: Any) -> Status:
    """Send one request with a connection of its own."""
    try:
        return httpx.post(f"{url}{path}", timeout=120, **request).status_code
    except httpx.HTTPError as error:
        return type(error).__name__
