"""``psc-serve`` in a process of its own, with a bundle or with the fake model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx

from tests import warm
from tests.conftest import ROOT, SHIPPED_BUNDLE

GUARD_SECONDS: Final = 600.0  # after this an event that a test waits for counts as missing

# Each request has a connection of its own; a client that checks certificates takes a while to make.
HTTP: Final = httpx.Client(verify=False, timeout=GUARD_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))

PSC_SERVE: Final = (sys.executable, "-m", "app.cli")


class Server:
    """A started server, the leader of a process group of its own; ``url`` is empty when it ended before it listened.

    It is one process with one backend, which tests start soonest; ``default`` leaves both to ``psc-serve``.
    """

    def __init__(
        self,
        *flags: str,
        program: Sequence[str] = PSC_SERVE,
        environment: Mapping[str, str] = MappingProxyType({}),
        default: bool = False,
    ) -> None:
        if not default:
            workers = [] if any(flag.startswith("--workers") for flag in flags) else ["--workers=0"]
            flags = ("--backend=folded", *workers, *flags)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
        start = subprocess.Popen if default else warm.Process
        self.process = start(
            [*program, "--port=0", "--device=cpu", *flags],
            cwd=ROOT,
            env={**kept, **environment},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.url = ""
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.until(lambda: self.url or not self._reader.is_alive())

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def children(self) -> dict[str, int]:
        """The living processes that the first one has started, by their names."""
        pid, named = self.process.pid, {}
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            with contextlib.suppress(FileNotFoundError):
                if is_alive(child):
                    named[Path(f"/proc/{child}/comm").read_text().strip()] = child
        return named

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + GUARD_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError("".join(self.log))
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.until(lambda: self.process.poll() is not None or is_ready(self.url))

    def wait_for_log(self, text: str, count: int = 1) -> None:
        self.until(lambda: self.count_in_log(text) >= count)

    def count_in_log(self, text: str) -> int:
        return sum(text in line for line in list(self.log))

    def metrics(self) -> str:
        return HTTP.get(self.url + "/metrics").text

    def end(self) -> int:
        code = self.process.wait(GUARD_SECONDS)
        self._reader.join(GUARD_SECONDS)
        return code

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "listening on " in line:
                self.url = json.loads(line)["message"].split()[-1]
            self.log.append(line)


@contextmanager
def serve(*flags: str, ready: bool = True, **options: Any) -> Iterator[Server]:
    server = Server(*flags, **options)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.close()


def serve_fake(*arguments: str, **options: Any) -> AbstractContextManager[Server]:
    """The fake model ``m``; see :mod:`tests.app.serve_fake` for the arguments."""
    program = (sys.executable, "-m", "tests.app.serve_fake")
    return serve(f"--bundle=m={SHIPPED_BUNDLE}", "--max-batch-size=8", *arguments, program=program, **options)


@contextmanager
def serve_shipped(*flags: str) -> Iterator[str]:
    """URL of the shipped bundle's service; at the end SIGTERM must end it with code 0."""
    with serve(f"--bundle={SHIPPED_BUNDLE}", *flags) as server:
        yield server.url
        assert server.terminate() == 0


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return HTTP.get(f"{url}/readyz").status_code == 200
    return False


def make_certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
