"""What the process does for the application: signals and threads."""

from __future__ import annotations

import signal

import httpx
import pytest
from fastapi import FastAPI

from app.runtime import linger_seconds, network_threads
from app.server import uvicorn_config
from app.settings import load_settings
from tests.app.fakes import png
from tests.app.support import PNG
from tests.served import GUARD_SECONDS, serve_fake

HALF = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc"
CLIENTS = 24


@pytest.mark.parametrize("drain_seconds", [2.0, 2.9, 30.0])
def test_lingering_and_draining_take_drain_seconds(drain_seconds: float) -> None:
    settings = load_settings({"drain_seconds": drain_seconds})
    drain = uvicorn_config(settings, FastAPI).timeout_graceful_shutdown
    assert drain is not None
    assert drain_seconds - 1 < linger_seconds(settings) + drain <= drain_seconds


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
