"""The shipped bundle behind the real command line, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.conftest import ROOT, SHIPPED_BUNDLE


@contextmanager
def serve_shipped(*flags: str) -> Iterator[str]:
    """URL of a ready service; at the end SIGTERM must end it with code 0."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PSC_")}
    command = [sys.executable, "-m", "app.cli", "--bundle", str(SHIPPED_BUNDLE), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "listening on" in line)
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    reader.start()
    address = line.split("listening on")[1].strip()
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{address}/readyz").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    try:
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()
