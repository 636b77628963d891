"""The real server in a process of its own: signals, TLS, a failing device, clients that leave, threads and memory."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from PIL import Image

from app.main import linger_seconds
from app.server import LastAccepting, LimitedProtocol, uvicorn_config
from app.settings import load_settings
from tests import warm
from tests.app.fakes import png
from tests.app.support import PNG, running, until
from tests.app.test_cli import command
from tests.app.test_healthcheck import healthcheck
from tests.conftest import ROOT
from tests.encoded import encode
from tests.served import GUARD_SECONDS, HTTP, Server, make_certificate, serve_fake

HALF = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc"
CLIENTS = 24


def whole() -> bytes:
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(png(5))}\r\n\r\n"
    return head.encode() + png(5)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), GUARD_SECONDS)


async def send_until_told_to_leave(url: str, began: threading.Event, *, keep_alive: bool) -> tuple[int, list[str]]:
    """Answers counted until one says ``Connection: close``; what went wrong otherwise."""
    wrong: list[str] = []
    answered = 0

    async def client() -> None:
        nonlocal answered
        limits = httpx.Limits(max_keepalive_connections=1 if keep_alive else 0)
        async with httpx.AsyncClient(limits=limits, verify=False, timeout=GUARD_SECONDS) as session:
            while not wrong:
                try:
                    response = await session.post(url + "/predict", content=png(5), headers=PNG)
                except httpx.HTTPError as error:
                    wrong.append(repr(error))
                    return
                if response.status_code != 200:
                    wrong.append(response.text)
                    return
                answered += 1
                if answered == 2 * CLIENTS:
                    began.set()
                if response.headers.get("connection") == "close":
                    return

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return answered, wrong


@pytest.mark.parametrize(("keep_alive", "workers"), [(True, 0), (False, 0), (True, 2), (False, 2)])
def test_sigterm_under_load_answers_every_request(keep_alive: bool, workers: int) -> None:
    with serve_fake("step=0.02", "linger=5", f"--workers={workers}") as server:
        began = threading.Event()

        async def scenario() -> tuple[int, list[str]]:
            load = asyncio.create_task(send_until_told_to_leave(server.url, began, keep_alive=keep_alive))
            await asyncio.to_thread(began.wait, GUARD_SECONDS)
            server.process.send_signal(signal.SIGTERM)
            return await load

        answered, wrong = asyncio.run(scenario())
        assert not wrong
        assert answered >= 3 * CLIENTS
        assert server.end() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_answers_on_an_open_connection(workers: int) -> None:
    with (
        serve_fake("linger=30", f"--workers={workers}") as server,
        httpx.Client(verify=False, timeout=GUARD_SECONDS) as client,
    ):
        assert "connection" not in client.get(server.url + "/healthz").headers
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log('"draining"')
        answer = client.post(server.url + "/predict", content=png(1), headers=PNG)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert client.post(server.url + "/predict", content=b"x", headers=PNG).headers["connection"] == "close"
        assert client.get(server.url + "/readyz").json()["reasons"] == {"service": "draining"}


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_ends_the_process_when_the_device_hangs(workers: int, tmp_path: Path) -> None:
    with (
        serve_fake("step=0.01", f"state={tmp_path}", "--drain-seconds=1", f"--workers={workers}") as server,
        connect(server) as client,
    ):
        (tmp_path / "hang").touch()
        client.sendall(whole())
        server.until((tmp_path / "hanging").exists)
        assert server.terminate() == 0
        assert not client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert server.count_in_log("draining") and server.count_in_log("Finished server")


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_ends_the_process_when_a_body_does_not_come(workers: int) -> None:
    with serve_fake("--drain-seconds=1", f"--workers={workers}") as server, connect(server) as client:
        client.sendall(HALF)
        server.until(lambda: "psc_inflight_requests 2.0" in server.metrics())  # The other one asks for the metrics.
        assert server.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_loses_no_row_of_the_log(number: signal.Signals, tmp_path: Path) -> None:
    with serve_fake(f"--log={tmp_path}", "linger=0.1") as server:
        HTTP.post(server.url + "/predict", content=png(1), headers=PNG).raise_for_status()
        for _ in range(3):
            server.process.send_signal(number)
        assert server.end() == 0
        assert not server.count_in_log("Traceback"), "\n".join(server.log)
    assert list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("flags", [(), ("--workers=2",)])
def test_sigterm_while_models_are_warmed_up_ends_the_process_with_0(flags: tuple[str, ...]) -> None:
    with serve_fake("step=0.2", "linger=0.1", *flags, ready=False) as server:
        server.wait_for_log("Waiting for application startup")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_the_access_log_has_the_client_that_a_proxy_names(workers: int) -> None:
    with serve_fake("--access-log", f"--workers={workers}") as server:
        for headers in ({}, {"x-forwarded-for": "203.0.113.9"}, {"x-forwarded-for": "9" * 60_000}):
            assert HTTP.get(server.url + "/healthz", headers=headers).status_code == 200
            assert HTTP.post(server.url + "/predict", content=png(1), headers=PNG | headers).status_code == 200
        assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    for path in ("/healthz", "/predict"):
        logged = [line["client"] for line in lines if line["message"] == "request" and line["path"] == path]
        assert logged[:2] == ["127.0.0.1", "203.0.113.9"]
        assert len(logged[2]) < 1100  # Whatever it names.


def test_sighup_reloads_in_the_same_process() -> None:
    with serve_fake() as server:
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: 'psc_reloads_total{model="m",result="ok"} 1.0' in server.metrics())
        assert server.count_in_log("Started server process") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_requests_of_clients_that_left_leave_the_queue(workers: int, tmp_path: Path) -> None:
    with serve_fake(
        "step=0.01", f"state={tmp_path}", "--deadline-seconds=1000", "--drain-seconds=1", f"--workers={workers}",
        "--threads=1",  # With two, another request would hang beside the first.
    ) as server:  # fmt: skip
        (tmp_path / "hang").touch()
        clients = [connect(server) for _ in range(6)]
        clients[0].sendall(whole())
        server.until((tmp_path / "hanging").exists)
        for client in clients[1:]:
            client.sendall(whole())
        server.until(lambda: 'psc_queue_depth{model="m"} 5.0' in server.metrics())
        for client in clients:  # With a reset: one that only closes its side may still want its answer.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        server.until(lambda: 'psc_queue_depth{model="m"} 0.0' in server.metrics())


def test_a_dead_device_ends_the_process_with_1_after_answering(tmp_path: Path) -> None:
    with serve_fake(f"state={tmp_path}") as server:
        (tmp_path / "dead").touch()
        answer = HTTP.post(server.url + "/predict", content=png(1), headers=PNG)
        assert answer.status_code == 503
        assert server.end() == 1
    with serve_fake(f"state={tmp_path}", ready=False) as server:  # And at the warm-up.
        assert server.end() == 1
        assert json.loads(server.log[-1])["level"] == "critical"


@pytest.mark.anyio
async def test_connections_that_wait_to_be_accepted_are_answered_at_the_end() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body"})

    protocol: Any = partial(LimitedProtocol, upload_seconds=60.0)
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, timeout_graceful_shutdown=30)
    server = LastAccepting(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    await server.startup([listener])
    # Nothing is awaited before the end, so the loop accepts none of them.
    clients = [socket.create_connection(address) for _ in range(20)]
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await server.shutdown([listener])
    for client in clients:
        with client:
            assert client.recv(100).startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize("drain_seconds", [0.0, 0.5, 2.9, 30.0])
@pytest.mark.parametrize(("log", "fraction"), [(None, 1.0), ("somewhere", 0.8)])
def test_lingering_and_draining_leave_time_for_the_log(drain_seconds: float, log: str | None, fraction: float) -> None:
    settings = load_settings({"drain_seconds": drain_seconds, "log": log})
    drain = uvicorn_config(settings, FastAPI).timeout_graceful_shutdown
    assert drain is not None
    assert linger_seconds(settings) + drain == pytest.approx(fraction * drain_seconds)


def tiff(compression: str, mode: str = "L") -> bytes:
    return encode(Image.linear_gradient("L").convert(mode), "TIFF", compression=compression)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_write_nothing_between_the_lines_of_the_log(workers: int) -> None:
    whole = [tiff("tiff_lzw"), tiff("tiff_adobe_deflate"), tiff("packbits"), tiff("group4", "1"), tiff("jpeg")]
    damaged = [data[:100] + b"\xa5" * 40 + data[140:] for data in whole]
    beyond_its_end = tiff("raw").replace(struct.pack("<HHL", 258, 3, 1), struct.pack("<HHL", 258, 3, 40_000))
    with serve_fake(f"--workers={workers}") as server:
        for image in (*damaged, beyond_its_end):
            answer = HTTP.post(server.url + "/predict", content=image, headers=PNG)
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
UvicornHost("", 0.0).models_changed()
print(resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_memory_of_replaced_models_is_returned() -> None:
    run = warm.run([sys.executable, "-c", REPLACE], capture_output=True, text=True, check=True)
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (7, "kept")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
@pytest.mark.parametrize("workers", [0, 2])
def test_https_with_a_certificate(tmp_path: Path, workers: int) -> None:
    certificate, key = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(certificate))
    with serve_fake(f"--tls-certificate={certificate}", f"--tls-key={key}", f"--workers={workers}") as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        answer = httpx.post(server.url + "/predict", content=png(3), headers=PNG, verify=trust, timeout=GUARD_SECONDS)
        assert answer.status_code == 200
        assert healthcheck(PSC_PORT=str(server.port), PSC_TLS_CERTIFICATE=str(certificate)) == 0
        with pytest.raises(httpx.TransportError):
            HTTP.get(f"http://127.0.0.1:{server.port}/healthz")
        assert server.terminate() == 0


def test_rejects_an_unusable_certificate_in_one_line(tmp_path: Path, tiny_bundle: Path) -> None:
    missing, broken = tmp_path / "missing.pem", tmp_path / "broken.pem"
    broken.write_text("no certificate\n")
    for path in (missing, broken):
        ended = command("--bundle", str(tiny_bundle), f"--tls-certificate={path}", f"--tls-key={path}")
        assert ended.returncode == 2
        assert str(path) in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.anyio
async def test_a_proxys_path_is_in_the_document_and_the_page_links_relatively() -> None:
    async with running(root_path="/uncertain") as app:
        document = (await app.client.get("/openapi.json")).json()
        assert {"url": "/uncertain"} in document["servers"]
        for path in ("/", "/docs"):
            page = (await app.client.get(path)).text
            assert 'href="/' not in page
            assert 'src="/' not in page
        assert 'url: "openapi.json"' in (await app.client.get("/page/docs.js")).text
        assert (await app.client.post("/predict", content=png(1), headers=PNG)).status_code == 200


YEAR = 365 * 24 * 3600.0


@pytest.mark.usefixtures("device_thread")
@pytest.mark.anyio
@pytest.mark.parametrize("jump", [YEAR, -YEAR])
async def test_a_wall_clock_that_jumps_ends_no_request(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(deadline_seconds=1000) as app:
        app.model.pipeline.check.clear()
        steps = len(app.model.pipeline.sizes)
        waiting = asyncio.create_task(app.client.post("/predict", content=png(1), headers=PNG))
        await until(lambda: len(app.model.pipeline.sizes) > steps)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        app.service.registry.sweep()
        queued = asyncio.create_task(app.client.post("/predict", content=png(2), headers=PNG))
        await until(lambda: app.pending)
        app.service.registry.sweep()
        app.model.pipeline.check.set()
        assert [(await each).status_code for each in (waiting, queued)] == [200, 200]


def test_no_key_is_in_the_log_or_the_metrics() -> None:
    keys = {
        name: f"secret-{name}-0123456789abcdef" for name in ("predict", "admin", "wrong", "bearer", "query", "cookie")
    }
    flags = (f"--api-keys={keys['predict']}", f"--admin-keys={keys['admin']}", "--log-level=debug", "--access-log")
    sent = [{"x-api-key": keys[name]} for name in ("predict", "admin", "wrong")]
    sent += [{"authorization": f"Bearer {keys['bearer']}"}, {"cookie": keys["cookie"]}]
    with serve_fake(*flags) as server, httpx.Client(base_url=server.url, verify=False, timeout=GUARD_SECONDS) as client:
        for headers in sent:
            client.post(f"/predict?api_key={keys['query']}", content=png(1), headers={**PNG, **headers})
            client.post("/admin/reload", headers=headers)
        metrics = server.metrics()
        assert server.terminate() == 0
    written = "".join(server.log) + metrics
    assert '"path":"/predict"' in written
    assert [name for name, key in keys.items() if key in written] == []
