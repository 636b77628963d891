"""Several workers: all of them answer, a dead one is replaced, SIGHUP replaces each, SIGTERM ends them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.app.fakes import png
from tests.app.support import PNG
from tests.app.test_server import whole
from tests.served import GUARD_SECONDS, Server, is_alive, serve_fake

PREDICTIONS = 'psc_predictions_total{label="dark",model="m"} %d.0'


def predict(server: Server) -> httpx.Response:
    """An answer, on a new connection."""
    return httpx.post(server.url + "/predict", content=png(1), headers=PNG, timeout=GUARD_SECONDS)


@contextlib.contextmanager
def two_workers(*arguments: str) -> Iterator[Server]:
    """A service whose workers are both ready."""
    with serve_fake("--workers=2", *arguments) as server:
        server.wait_for_log('"model ready"', 2)
        yield server


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that tells the shared server's model what to do."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[Server]:
    """One for all tests that leave it with two workers."""
    with two_workers("--admin-keys=secret", f"state={state}") as started:
        yield started


@contextlib.contextmanager
def predicting(server: Server) -> Iterator[list[int]]:
    """The statuses of predictions that are made one after the other meanwhile; 0 for a failure."""
    statuses: list[int] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            try:
                statuses.append(predict(server).status_code)
            except httpx.HTTPError:
                statuses.append(0)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()


def test_metrics_are_sums_over_workers_and_forget_dead_ones() -> None:
    with two_workers() as server:
        limit = "psc_queue_limit_images"
        server.until(lambda: f'{limit}{{model="m"}} 4096.0' in server.metrics())
        for _ in range(20):
            assert predict(server).status_code == 200
        server.until(lambda: PREDICTIONS % 20 in server.metrics())  # Recorded a few times a second.
        os.kill(min(server.workers), signal.SIGKILL)
        server.wait_for_log('"model ready"', 3)
        server.until(lambda: f'{limit}{{model="m"}} 4096.0' in server.metrics())
        assert PREDICTIONS % 20 in server.metrics()


def test_a_killed_worker_is_replaced_while_the_other_answers(server: Server) -> None:
    before, ready = server.workers, server.count_in_log('"model ready"')
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    server.until(lambda: not is_alive(min(before)))
    with predicting(server) as statuses:
        server.wait_for_log('"model ready"', ready + 1)
    assert set(statuses) == {200}
    assert len(server.workers) == 2
    assert max(before) in server.workers


def test_both_workers_answer(server: Server) -> None:
    for stopped in server.workers:  # A connection that it accepted would wait for it, but nobody is connected.
        os.kill(stopped, signal.SIGSTOP)
        assert predict(server).status_code == 200
        os.kill(stopped, signal.SIGCONT)


def test_sighup_replaces_all_workers_while_requests_are_answered(server: Server) -> None:
    before = server.workers
    with predicting(server) as statuses:
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: len(server.workers) == 2 and not server.workers & before)
    assert set(statuses) == {200}
    server.until(lambda: "psc_ready 1.0" in server.metrics())  # The last values of those that ended are gone.
    assert 'psc_queue_limit_images{model="m"} 4096.0' in server.metrics()


def test_a_reload_over_http_reaches_all_workers(server: Server) -> None:
    before = server.workers
    answer = httpx.post(server.url + "/admin/reload", headers={"x-api-key": "secret"}, timeout=GUARD_SECONDS)
    assert answer.status_code == 200, answer.text
    server.until(lambda: len(server.workers) == 2 and not server.workers & before)
    assert predict(server).status_code == 200


def test_a_reload_that_fails_leaves_the_workers_as_they_are(server: Server, state: Path) -> None:
    before = server.workers
    (state / "bad").touch()
    answer = httpx.post(server.url + "/admin/reload", headers={"x-api-key": "secret"}, timeout=GUARD_SECONDS)
    assert (answer.status_code, answer.json()["detail"]) == (422, "the bundle is bad")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_log("aborting the restart")
    (state / "bad").unlink()
    assert server.workers == before
    assert predict(server).status_code == 200


def test_a_bad_bundle_ends_the_service_with_2(tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    with serve_fake("--workers=2", f"state={tmp_path}", ready=False) as server:
        assert server.end() == 2
        assert any("the bundle is bad" in line for line in server.log)
        last = json.loads(server.log[-1])
        assert (last["level"], last["message"]) == ("critical", "a worker could not start; see the log")


def test_sigterm_ends_all_workers_and_stops_listening() -> None:
    with two_workers() as server:
        workers = server.workers
        assert server.terminate() == 0
        assert not any(map(is_alive, workers))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


def test_the_parent_stops_listening_before_the_workers_end(tmp_path: Path) -> None:
    with two_workers("step=0.01", f"state={tmp_path}", "--drain-seconds=1000", "--deadline-seconds=1000") as server:
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(whole())
            server.until((tmp_path / "hanging").exists)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("Shutting down", 2)

            def refused() -> bool:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", server.port)).close()
                    return False
                return True

            server.until(refused)
            assert server.process.poll() is None


def test_workers_end_when_their_parent_is_killed() -> None:
    with two_workers() as server:
        workers = server.workers
        server.process.kill()
        server.until(lambda: not any(map(is_alive, workers)))
