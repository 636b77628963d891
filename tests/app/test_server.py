"""The real server in a process of its own: start, SIGTERM under load, SIGHUP, failure, workers, bad input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.app.fakes import png

HERE = Path(__file__).resolve().parent
PNG = {"content-type": "image/png"}


class Process:
    """A started server."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_fake.py"), "--port=0", "--max-batch-size=8", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().split()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.errors = ""

    def wait_ready(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/readyz").status_code == 200:
                    return
            time.sleep(0.05)
        raise TimeoutError("the server did not become ready")

    def end(self, seconds: float = 30.0) -> int:
        """Wait for the exit code."""
        self.process.wait(seconds)
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()
        return self.process.returncode


@contextlib.contextmanager
def serving(*arguments: str, ready: bool = True) -> Iterator[Process]:
    server = Process(*arguments)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.communicate()


async def closed_loop(url: str, clients: int, seconds: float, *, keep_alive: bool) -> tuple[int, list[str]]:
    """Answers counted until the server refuses connections; what went wrong otherwise."""
    wrong: list[str] = []
    answered = 0
    end = time.monotonic() + seconds

    async def client() -> None:
        nonlocal answered
        limits = httpx.Limits(max_keepalive_connections=1 if keep_alive else 0)
        async with httpx.AsyncClient(limits=limits, timeout=20, verify=False) as session:
            while time.monotonic() < end:
                try:
                    response = await session.post(url + "/predict", content=png(5), headers=PNG)
                except httpx.ConnectError:
                    return
                except httpx.HTTPError as error:
                    wrong.append(repr(error))
                    return
                if response.status_code != 200:
                    wrong.append(response.text)
                    return
                answered += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return answered, wrong


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("keep_alive", [True, False])
def test_sigterm_under_load_answers_every_accepted_request(keep_alive: bool, workers: int) -> None:
    with serving("step=0.02", "--drain-seconds=10", f"--workers={workers}") as server:

        async def scenario() -> tuple[int, list[str]]:
            load = asyncio.create_task(closed_loop(server.url, 24, 15.0, keep_alive=keep_alive))
            await asyncio.sleep(1.0)
            server.process.send_signal(signal.SIGTERM)
            return await load

        answered, wrong = asyncio.run(scenario())
        assert server.end() == 0, server.errors
        assert not wrong
        assert answered > 24


def test_sigterm_ends_within_drain_seconds_even_when_the_device_hangs() -> None:
    with serving("step=0", "--drain-seconds=1") as server, socket.create_connection(("127.0.0.1", server.port)) as held:
        held.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.end() == 0, server.errors
        assert time.monotonic() - began < 5


def test_the_access_log_has_the_client_that_a_proxy_names() -> None:
    with serving("--access-log") as server:
        for headers in ({}, {"x-forwarded-for": "203.0.113.9"}):
            assert httpx.get(server.url + "/healthz", headers=headers).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.end()
    lines = [json.loads(line) for line in server.errors.splitlines()]
    logged = [line["client"] for line in lines if line["message"] == "request" and line["path"] == "/healthz"]
    assert logged == ["127.0.0.1", "203.0.113.9"]


def test_a_client_that_hangs_up_has_its_work_dropped() -> None:
    with serving("step=0.3") as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                body = png(5)
                head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(body)}"
                connection.sendall(head.encode() + b"\r\n\r\n" + body)
                time.sleep(0.02)
        began = time.monotonic()
        while "psc_queue_depth 0.0" not in (text := httpx.get(server.url + "/metrics").text):
            assert time.monotonic() - began < 5
            time.sleep(0.05)
        counted = next(line for line in text.splitlines() if line.startswith("psc_batch_size_sum"))
        assert float(counted.split()[1]) < 20


def test_sighup_reloads() -> None:
    with serving() as server:
        server.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 10
        while 'psc_reloads_total{model="m",result="ok"} 1.0' not in httpx.get(server.url + "/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert httpx.post(server.url + "/predict", content=png(1), headers=PNG).status_code == 200


def test_an_idle_connection_is_closed_after_its_time() -> None:
    with serving("--keep-alive-seconds=1") as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10.0)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        while client.recv(4096):
            pass
        assert 0.5 < time.monotonic() - began < 4.5  # uvicorn's own time is 5 s


def test_the_supervisor_too_stops_listening_when_it_drains() -> None:
    with serving("--workers=2") as server, httpx.Client() as client:
        client.get(server.url + "/healthz")  # a connection in use, for which a worker lingers
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 1.0)
        assert server.end() == 0


def test_a_dead_device_ends_the_process_with_1_after_answering() -> None:
    with serving("die-after=1.5") as server:
        time.sleep(1.6)
        response = httpx.post(server.url + "/predict", content=png(1), headers=PNG)
        assert response.status_code == 503
        assert server.end() == 1


def test_a_killed_worker_is_replaced_and_metrics_are_of_all_workers() -> None:
    with serving("--workers=2", "--drain-seconds=5") as server:
        for _ in range(20):
            assert httpx.post(server.url + "/predict", content=png(1), headers=PNG).status_code == 200
        end = time.monotonic() + 5  # The other worker books its predictions a few times a second.
        while 'psc_predictions_total{label="dark"} 20.0' not in (text := httpx.get(server.url + "/metrics").text):
            assert time.monotonic() < end, text
            time.sleep(0.02)
        children = _children(server.process.pid)
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        end = time.monotonic() + 30
        while len(new := _children(server.process.pid)) < 2 or children[0] in new:
            assert time.monotonic() < end
            time.sleep(0.05)
        server.wait_ready()
        assert httpx.post(server.url + "/predict", content=png(1), headers=PNG).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.errors


def test_connections_are_shared_out_among_workers() -> None:
    with serving("--workers=2") as server, contextlib.ExitStack() as clients:
        children = _children(server.process.pid)

        def given(count: int) -> list[int]:
            """How the workers' connections grow by that many of ours."""
            before = [_sockets(child) for child in children]
            for _ in range(count):
                clients.enter_context(socket.create_connection(("127.0.0.1", server.port), 5.0))
            end = time.monotonic() + 10
            while sum(more := [_sockets(child) - had for child, had in zip(children, before, strict=True)]) < count:
                assert time.monotonic() < end, more
                time.sleep(0.01)
            return more

        time.sleep(0.5)  # The connections by which readiness was asked are gone.
        while given(2) != [1, 1]:  # One of them was not ready, or has fewer for that.
            time.sleep(0.05)
        assert given(20) == [10, 10]


def test_a_reload_by_one_worker_reaches_the_others() -> None:
    with serving("--workers=2", "--admin-keys=secret") as server:

        def reloads() -> int:
            found = re.search(
                r'psc_reloads_total{model="m",result="ok"} (\d+)', httpx.get(server.url + "/metrics").text
            )
            return int(found[1]) if found else 0

        end = time.monotonic() + 60
        before = reloads()
        while reloads() < before + 2:
            assert time.monotonic() < end
            before = reloads()
            response = httpx.post(server.url + "/admin/reload", headers={"x-api-key": "secret"})
            assert response.status_code == 200, response.text
            time.sleep(2.0)  # Until both are ready, one reload is only one.


def test_workers_end_with_their_supervisor() -> None:
    with serving("--workers=2", "--drain-seconds=5") as server:
        children = _children(server.process.pid)
        assert len(children) == 2
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 20
        while any(map(_alive, children)):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_workers_that_cannot_start_end_the_service_with_2() -> None:
    with serving("--workers=2", "bad=/", ready=False) as server:
        assert server.end() == 2


def test_a_worker_whose_replacement_is_refused_does_not_end_the_others(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    with serving("--workers=2", f"bad={bad}") as server:
        end = time.monotonic() + 60
        while "psc_queue_limit_images 4096.0" not in httpx.get(server.url + "/metrics").text:  # That of two workers.
            assert time.monotonic() < end
            time.sleep(0.05)
        before = set(_children(server.process.pid))
        bad.touch()
        os.kill(min(before), signal.SIGKILL)
        refused: set[int] = set()
        while len(refused) < 2:  # Replacements come and go.
            assert time.monotonic() < end
            refused |= set(_children(server.process.pid)) - before
            time.sleep(0.02)
        assert httpx.post(server.url + "/predict", content=png(1), headers=PNG).status_code == 200
        assert server.process.poll() is None


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [child for child in map(int, text.split()) if _alive(child)]


def _sockets(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError):  # It is gone.
        return sum(str(each.readlink()).startswith("socket:") for each in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a bundle to serve"),
        (["--bundle", "/nowhere"], "manifest.json"),
        (["--alpha", "7"], "setting alpha"),
        (["--config", "/nowhere.toml"], "check --config"),
        (["--prot", "1"], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(arguments: list[str], message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
    result = subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=HERE.parents[1],
        check=False,
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("psc-serve: ")]) == 1


def test_a_taken_port_is_code_2(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [sys.executable, "-m", "app.cli", "--bundle", str(tmp_path), "--port", port],
            capture_output=True,
            text=True,
            cwd=HERE.parents[1],
            check=False,
        )
    assert result.returncode == 2
    assert "expected to listen on" in result.stderr


def test_a_corrupt_bundle_is_code_2_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    result = subprocess.run(
        [sys.executable, "-m", "app.cli", "--bundle", str(tmp_path), "--port", "0", "--drain-seconds", "2"],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        check=False,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert "psc-serve: " in result.stderr
    assert "manifest" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
