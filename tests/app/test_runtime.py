"""What the process does for the application: signals and threads."""

from __future__ import annotations

import io
import platform
import signal
import struct
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from app.main import linger_seconds, network_threads
from app.server import uvicorn_config
from app.settings import load_settings
from tests.app.fakes import png
from tests.app.support import PNG
from tests.conftest import ROOT
from tests.served import GUARD_SECONDS, serve_fake

HALF = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc"
CLIENTS = 24


@pytest.mark.parametrize("drain_seconds", [0.0, 0.5, 2.9, 30.0])
@pytest.mark.parametrize(("log", "fraction"), [(None, 1.0), ("somewhere", 0.8)])
def test_lingering_and_draining_leave_time_for_the_log(drain_seconds: float, log: str | None, fraction: float) -> None:
    settings = load_settings({"drain_seconds": drain_seconds, "log": log})
    drain = uvicorn_config(settings, FastAPI).timeout_graceful_shutdown
    assert drain is not None
    assert linger_seconds(settings) + drain == pytest.approx(fraction * drain_seconds)


def test_sighup_reloads_in_the_same_process() -> None:
    with serve_fake() as server:
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: 'psc_reloads_total{model="m",result="ok"} 1.0' in server.metrics())
        answer = httpx.post(server.url + "/predict", content=png(1), headers=PNG, timeout=GUARD_SECONDS)
        assert answer.status_code == 200
        assert sum("Started server process" in line for line in server.log) == 1


def test_workers_share_the_threads_unless_told() -> None:
    chosen = {
        flags: network_threads(load_settings(dict(flags)), 8)
        for flags in ((), (("workers", 2),), (("workers", 3),), (("workers", 16),), (("workers", 2), ("threads", 8)))
    }
    assert list(chosen.values()) == [8, 4, 2, 1, 8]


def tiff(compression: str, mode: str = "L") -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert(mode).save(buffer, "TIFF", compression=compression)
    return buffer.getvalue()


def test_damaged_images_write_nothing_between_the_lines_of_the_log() -> None:
    whole = [tiff("tiff_lzw"), tiff("tiff_adobe_deflate"), tiff("packbits"), tiff("group4", "1"), tiff("jpeg")]
    damaged = [data[:100] + b"\xa5" * 40 + data[140:] for data in whole]
    beyond_its_end = tiff("raw").replace(struct.pack("<HHL", 258, 3, 1), struct.pack("<HHL", 258, 3, 40_000))
    with serve_fake() as server:
        for image in (*damaged, beyond_its_end):
            answer = httpx.post(server.url + "/predict", content=image, headers=PNG, timeout=GUARD_SECONDS)
            assert answer.status_code in (200, 422)  # libtiff goes on after some errors.
        assert server.terminate() == 0
    assert len(server.log) == sum(line.startswith('{"time":') for line in server.log), "".join(server.log)


REPLACE = """
import re
from pathlib import Path
from types import SimpleNamespace
import torch
from app.server import UvicornHost
from psc_core.allocator import keep_freed_memory

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

keep_freed_memory()
old, new = SimpleNamespace(weight=torch.ones(64 << 18)), torch.ones(1)
old.itself = old
del old
print(resident_mib())
UvicornHost().models_changed()
print(resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_memory_of_replaced_models_is_returned() -> None:
    run = subprocess.run([sys.executable, "-c", REPLACE], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert before - after > 56


COMPUTING = """
import sys, threading, time
import torch
from app import main

seconds, main._THREAD_SECONDS = map(float, sys.argv[1:])
began = time.monotonic()

def compute():
    while time.monotonic() < began + seconds:
        torch.ones(8, 8) @ torch.ones(8, 8)

threading.Thread(target=compute, name="psc-device-m", daemon=True).start()
print("kept", end="")
main.end_threads(7)
sys.exit(7)
"""


@pytest.mark.parametrize(("seconds", "wait"), [(1.0, 600.0), (600.0, 0.1)])
def test_a_thread_that_computes_does_not_abort_the_process(seconds: float, wait: float) -> None:
    command = [sys.executable, "-c", COMPUTING, str(seconds), str(wait)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=GUARD_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (7, "kept")
