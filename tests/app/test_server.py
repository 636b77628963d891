"""The real server in one process of its own: SIGTERM, SIGHUP, a failing device, clients that leave."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import struct
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from app.protocol import LimitedProtocol
from app.server import METRICS_BYTES, LastAccepting, metrics_parent, uvicorn_config
from app.settings import load_settings
from psc_core.errors import UsageError
from tests.app.fakes import png
from tests.app.support import PNG
from tests.served import GUARD_SECONDS, Server, serve_fake

HALF = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc"
CLIENTS = 24


def whole() -> bytes:
    """A request of one image."""
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
        async with httpx.AsyncClient(limits=limits, timeout=GUARD_SECONDS) as session:
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


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("keep_alive", [True, False], ids=["one connection", "new connections"])
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


def test_sigterm_answers_on_an_open_connection_and_stops_listening() -> None:
    with serve_fake("linger=30") as server, httpx.Client(timeout=GUARD_SECONDS) as client:
        assert "connection" not in client.get(server.url + "/healthz").headers
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log('"draining"')
        answer = client.post(server.url + "/predict", content=png(1), headers=PNG)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert client.get(server.url + "/readyz").json()["reasons"] == {"service": "draining"}
        assert server.end() == 0
        with pytest.raises(ConnectionRefusedError):
            connect(server)


def test_sigterm_ends_the_process_when_the_device_hangs(tmp_path: Path) -> None:
    with serve_fake("step=0.01", f"state={tmp_path}", "--drain-seconds=1") as server, connect(server) as client:
        (tmp_path / "hang").touch()
        client.sendall(whole())
        server.until((tmp_path / "hanging").exists)
        assert server.terminate() == 0
        assert not client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert [name for name in ("draining", "Cancel 1 running task", "Finished server") if in_log(server, name)] == [
        "draining",
        "Cancel 1 running task",
        "Finished server",
    ]


def in_log(server: Server, text: str) -> bool:
    return any(text in line for line in server.log)


def test_sigterm_ends_the_process_when_a_body_does_not_come() -> None:
    with serve_fake("--drain-seconds=1") as server, connect(server) as client:
        client.sendall(HALF)
        server.until(lambda: "psc_inflight_requests 2.0" in server.metrics())  # The other one asks for the metrics.
        assert server.terminate() == 0


def test_a_second_sigterm_changes_nothing() -> None:
    with serve_fake() as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log('"draining"')
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_sigint_ends_the_process_with_0() -> None:
    with serve_fake() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert not in_log(server, "Traceback")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_loses_no_row_of_the_log(number: signal.Signals, tmp_path: Path) -> None:
    with serve_fake(f"--log={tmp_path}", "linger=0.1") as server:
        httpx.post(server.url + "/predict", content=png(1), headers=PNG, timeout=GUARD_SECONDS).raise_for_status()
        for _ in range(3):
            server.process.send_signal(number)
        assert server.end() == 0
    assert list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("flags", [(), ("--workers=2",)])
def test_sigterm_while_models_are_warmed_up_ends_the_process_with_0(flags: tuple[str, ...]) -> None:
    with serve_fake("step=0.2", "linger=0.1", *flags, ready=False) as server:
        server.wait_for_log("Waiting for application startup")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_the_access_log_has_the_client_that_a_proxy_names() -> None:
    with serve_fake("--access-log") as server:
        for headers in ({}, {"x-forwarded-for": "203.0.113.9"}, {"x-forwarded-for": "9" * 60_000}):
            assert httpx.get(server.url + "/healthz", headers=headers, timeout=GUARD_SECONDS).status_code == 200
        assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    logged = [line["client"] for line in lines if line["message"] == "request" and line["path"] == "/healthz"]
    assert logged[:2] == ["127.0.0.1", "203.0.113.9"]
    assert len(logged[2]) < 1100  # Whatever it names.


def test_requests_of_clients_that_left_leave_the_queue(tmp_path: Path) -> None:
    with serve_fake("step=0.01", f"state={tmp_path}", "--deadline-seconds=1000", "--drain-seconds=1") as server:
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


def test_clients_that_close_their_side_are_answered() -> None:
    with serve_fake("step=0.01") as server:
        clients = [connect(server) for _ in range(20)]
        for client in clients:
            client.sendall(whole())
            client.shutdown(socket.SHUT_WR)
        for client in clients:
            with client, client.makefile("rb") as answer:
                assert answer.read().startswith(b"HTTP/1.1 200")
        assert server.terminate() == 0


def test_an_idle_connection_is_closed() -> None:
    assert uvicorn_config(load_settings({"keep_alive_seconds": 3}), FastAPI).timeout_keep_alive == 3
    with serve_fake("--keep-alive-seconds=1") as server, connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while piece := client.recv(4096):
            received += piece
        assert received.startswith(b"HTTP/1.1 200")


def test_a_dead_device_ends_the_process_with_1_after_answering(tmp_path: Path) -> None:
    with serve_fake(f"state={tmp_path}") as server:
        (tmp_path / "dead").touch()
        answer = httpx.post(server.url + "/predict", content=png(1), headers=PNG, timeout=GUARD_SECONDS)
        assert answer.status_code == 503
        assert server.end() == 1
        assert "the compute device failed" in json.loads(server.log[-1])["message"]


def test_a_device_that_fails_at_warm_up_ends_the_process_with_1(tmp_path: Path) -> None:
    (tmp_path / "dead").touch()
    with serve_fake(f"state={tmp_path}", ready=False) as server:
        assert server.end() == 1
        assert "model 'm' failed at warm-up" in json.loads(server.log[-1])["message"]


def test_metrics_of_several_workers_go_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    free = {small: METRICS_BYTES - 1, large: METRICS_BYTES}
    for place in free:
        place.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    assert metrics_parent([tmp_path / "absent", small, large]) == large
    with pytest.raises(UsageError, match=r"several workers need 64 MiB for their metrics in .*small; free"):
        metrics_parent([small])


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
