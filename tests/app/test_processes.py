"""Fronts before an engine: the same answers as one process gives, and what happens when either of the two dies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import httpx
import pytest

from app.channel import CALL, HELLO, MODELS, Board, Channel, Place
from app.front import Front, Taken
from app.http.model import QUERY
from app.processes import EngineHost, FrontCalls
from app.service import ApiKeys, Service
from app.settings import Settings
from tests.app.fakes import POISON, PREPROCESS, png
from tests.app.support import PNG, Running, until
from tests.app.test_server import connect, whole
from tests.served import GUARD_SECONDS, HTTP, Server, is_alive, serve_fake

PREDICTIONS: Final = 'psc_predictions_total{label="dark",model="m"} %d.0'
JSON: Final = {"content-type": "application/json"}
ADMIN: Final = {"x-api-key": "secret"}
KEYS: Final = ApiKeys(frozenset(), frozenset(), frozenset())


def predict(server: Server, **headers: str) -> httpx.Response:
    return HTTP.post(server.url + "/predict", content=png(1), headers=PNG | headers)


def predicts(server: Server, **headers: str) -> bool:
    with contextlib.suppress(httpx.TransportError):  # The process that accepted the connection is being replaced.
        return predict(server, **headers).status_code == 200
    return False


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[Server]:
    with serve_fake("--workers=2", "--admin-keys=secret", f"state={state}") as started:
        yield started


@pytest.fixture(scope="module")
def alone() -> Iterator[Server]:
    with serve_fake("--workers=0", "--admin-keys=secret") as started:
        yield started


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def predicting(server: Server) -> Iterator[list[str]]:
    """What came of predictions that are made one after the other meanwhile, "" if it was an answer."""
    seen: list[str] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            try:
                answer = predict(server)
                seen.append("" if answer.status_code == 200 else answer.text)
            except httpx.HTTPError as error:
                seen.append(repr(error))

    with meanwhile(send):
        try:
            yield seen
        finally:
            ended.set()


def many(*images: bytes) -> bytes:
    return json.dumps({"images": [{"b64": base64.b64encode(image).decode()} for image in images]}).encode()


PART: Final = b'--x\r\ncontent-disposition: form-data; name="images"; filename="a.png"\r\n\r\n%s\r\n--x--\r\n'
FORM: Final = {"content-type": "multipart/form-data; boundary=x"}
TENSOR: Final = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": [base64.b64encode(png(9)).decode()]}
# Name, method, path, headers and body of requests that both ways of serving must answer alike.
REQUESTS: Final[dict[str, tuple[str, str, dict[str, str], bytes]]] = {
    "image": ("POST", "/predict", PNG, png(3)),
    "by name": ("POST", "/models/m/predict", PNG, png(200)),
    "explained": ("POST", "/predict?explain=true", PNG, png(3)),
    "parameters": ("POST", "/predict?alpha=0.2&top_k=2&monitor=false", PNG, png(90)),
    "many": ("POST", "/predict", JSON, many(*(png(grey) for grey in range(0, 200, 10)))),
    "unknown model": ("POST", "/models/x/predict", PNG, png(3)),
    "unknown parameter": ("POST", "/predict?alhpa=0.2", PNG, png(3)),
    "alpha too small": ("POST", "/predict?alpha=0.0001", PNG, png(3)),
    "no map": ("POST", "/predict?explain=true&map=true", PNG, png(3)),
    "map alone": ("POST", "/predict?map=true", PNG, png(3)),
    "no image": ("POST", "/predict", PNG, b""),
    "damaged": ("POST", "/predict", PNG, png(3)[:40]),
    "one damaged": ("POST", "/predict", JSON, many(png(3), png(3)[:40])),
    "another format": ("POST", "/predict", PNG, b"%PDF-1.4 and so on"),
    "text": ("POST", "/predict", {"content-type": "text/plain"}, b"hello"),
    "compressed": ("POST", "/predict", PNG | {"content-encoding": "gzip"}, png(3)),
    "not JSON": ("POST", "/predict", JSON, b"{"),
    "the network fails": ("POST", "/predict", PNG, png(POISON)),
    "multipart": ("POST", "/predict", FORM, PART % png(7)),
    "multipart, damaged": ("POST", "/predict", FORM, PART % b"x"),
    "wrong method": ("GET", "/predict", {}, b""),
    "model": ("GET", "/model", {}, b""),
    "no such path": ("GET", "/nothing", {}, b""),
    "page": ("GET", "/", {}, b""),
    "head": ("HEAD", "/healthz", {}, b""),
    "v2": ("POST", "/v2/models/m/infer", JSON, json.dumps({"inputs": [TENSOR]}).encode()),
    "v2, large": ("POST", "/v2/models/m/infer", JSON, json.dumps({"inputs": [TENSOR], "id": "x" * 300_000}).encode()),
    "v2, not ours": ("POST", "/v2/models/m/infer", JSON, b'{"inputs": 1}'),
    "admin without a key": ("POST", "/admin/reload", {}, b""),
    "document": ("GET", "/openapi.json", {}, b""),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_fronts_answer_as_one_process_does(name: str, server: Server, alone: Server) -> None:
    method, path, headers, body = REQUESTS[name]

    def seen(by: Server) -> tuple[Any, ...]:
        answer = HTTP.request(method, by.url + path, headers=headers, content=body)
        kept = {name: value for name, value in answer.headers.items() if name not in ("date", "traceresponse")}
        assert len(answer.headers["traceresponse"]) == 55
        return answer.status_code, kept, answer.content

    assert seen(server) == seen(alone)


def test_metrics_are_those_of_all_fronts_and_outlive_one() -> None:
    with serve_fake("--workers=2") as server:
        for _ in range(20):
            assert predict(server).status_code == 200
        server.until(lambda: PREDICTIONS % 20 in server.metrics())  # Recorded a few times a second.
        os.kill(server.children["psc-front-0"], signal.SIGKILL)
        server.wait_for_log("front-0 has ended (-9) and is replaced")
        assert PREDICTIONS % 20 in server.metrics()
        for status, count in (("200", 20), ("415", 1)):
            if count == 1:
                HTTP.post(server.url + "/predict", content=b"x", headers={"content-type": "text/plain"})
            line = f'psc_request_seconds_count{{route="/predict",status="{status}"}} {count}.0'
            server.until(lambda line=line: line in server.metrics())


def test_the_trace_of_the_caller_is_continued(server: Server) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = PNG | {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = HTTP.post(server.url + "/predict", content=png(1), headers=headers)
    assert answer.headers["traceresponse"].split("-")[1] == trace


def test_an_error_of_a_front_is_logged_under_the_id_of_its_answer(server: Server, state: Path) -> None:
    (state / "bug").touch()
    answers: list[httpx.Response] = []  # Of the engine, while a front does not know the model.
    server.until(lambda: answers.append(predict(server)) or answers[-1].status_code == 500)
    (state / "bug").unlink()
    server.wait_for_log("ValueError: a bug")
    (line,) = [json.loads(line) for line in list(server.log) if "ValueError: a bug" in line]
    assert line["trace_id"] == answers[-1].headers["traceresponse"].split("-")[1]


def test_a_killed_front_is_replaced_while_the_other_answers(server: Server) -> None:
    before = server.children
    assert sorted(before) == ["psc-engine", "psc-front-0", "psc-front-1"]
    os.kill(before["psc-front-1"], signal.SIGKILL)
    server.until(lambda: not is_alive(before["psc-front-1"]))
    with predicting(server) as seen:
        server.until(lambda: server.children.get("psc-front-1", before["psc-front-1"]) != before["psc-front-1"])
        server.until(lambda: len(seen) > 20)
    assert set(seen) == {""}
    assert {**server.children, "psc-front-1": 0} == {**before, "psc-front-1": 0}


def test_both_fronts_answer(server: Server) -> None:
    for name in ("psc-front-0", "psc-front-1"):  # A connection that it accepted would wait, but nobody is connected.
        os.kill(server.children[name], signal.SIGSTOP)
        assert predict(server).status_code == 200
        os.kill(server.children[name], signal.SIGCONT)


def test_without_an_engine_fronts_say_so_until_another_one_is_ready(tmp_path: Path) -> None:
    with serve_fake("--workers=2", "step=0.01", f"state={tmp_path}") as server, connect(server) as waiting:
        before = server.children
        (tmp_path / "hang").touch()
        waiting.sendall(whole())
        server.until((tmp_path / "hanging").exists)
        (tmp_path / "hang").unlink()
        os.kill(before["psc-engine"], signal.SIGKILL)
        answer = waiting.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503"), (answer, *server.log)
        answers = [predict(server)]
        server.until(lambda: answers.append(predict(server)) or answers[-1].status_code == 200)
        refused = [answer for answer in answers if answer.status_code != 200]
        for answer in refused:
            kind = answer.json()["type"].rpartition(":")[2]
            assert (answer.status_code, kind) in {(503, "engine-lost"), (503, "not-ready")}
            assert int(answer.headers["retry-after"]) > 0
        assert server.children["psc-front-0"] == before["psc-front-0"]
        assert server.children["psc-engine"] != before["psc-engine"]
        assert HTTP.get(server.url + "/readyz").status_code == 200
        assert server.terminate() == 0


def test_a_process_that_does_not_move_is_replaced() -> None:
    with serve_fake("--workers=1", "moves=2") as server:
        for name in ("psc-front-0", "psc-engine"):
            before = server.children[name]
            os.kill(before, signal.SIGSTOP)
            server.wait_for_log(f"{name.removeprefix('psc-')} has not moved for 2 s")
            server.until(lambda name=name, before=before: server.children.get(name, before) != before)
            server.until(lambda: predicts(server))


@pytest.mark.parametrize("name", ["front-0", "engine"])
def test_a_new_process_has_the_keys_of_the_others(name: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(ADMIN["x-api-key"])
    with serve_fake("--workers=1", f"--api-keys-file={file}") as server:
        file.write_text("")
        os.kill(server.children[f"psc-{name}"], signal.SIGKILL)
        server.wait_for_log(f"{name} has ended (-9) and is replaced")
        server.until(lambda: server.process.poll() is not None or predicts(server, **ADMIN))
        assert predict(server).status_code == 401


def test_a_service_that_was_stopped_as_a_whole_goes_on() -> None:
    with serve_fake("--workers=1", "moves=10") as server:  # So long that a busy machine does not look like a hang.
        before = server.children
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(11)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)  # So that the parent looks before the others have moved.
        os.killpg(server.process.pid, signal.SIGCONT)
        server.until(lambda: predicts(server))
        assert server.children == before
        assert not server.count_in_log("has not moved")


def test_sighup_reloads_while_requests_are_answered(server: Server) -> None:
    before = server.children
    reloaded = HTTP.get(server.url + "/metrics").text.count("psc_reloads_total")
    assert reloaded
    with predicting(server) as seen:
        for count in range(1, 4):
            server.process.send_signal(signal.SIGHUP)
            server.until(
                lambda count=count: f'psc_reloads_total{{model="m",result="ok"}} {count}.0' in server.metrics()
            )
    assert set(seen) == {""}
    assert server.children == before


def test_a_reload_that_fails_changes_nothing(server: Server, state: Path) -> None:
    (state / "bad").touch()
    answer = HTTP.post(server.url + "/admin/reload", headers=ADMIN)
    assert (answer.status_code, answer.json()["detail"]) == (422, "the bundle is bad")
    (state / "bad").unlink()
    assert predict(server).status_code == 200
    assert HTTP.post(server.url + "/admin/reload", headers=ADMIN).status_code == 200


def test_a_bad_bundle_ends_the_service_with_2(tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    with serve_fake("--workers=2", f"state={tmp_path}", ready=False) as server:
        assert server.end() == 2
        last = json.loads(server.log[-1])
        assert last["level"] == "critical" and "the bundle is bad" in last["message"]


def test_a_device_that_dies_is_replaced_with_its_engine(tmp_path: Path) -> None:
    with serve_fake("--workers=2", f"state={tmp_path}") as server:
        before = server.children
        (tmp_path / "dead").touch()
        assert predict(server).status_code == 503
        server.until(lambda: not is_alive(before["psc-engine"]))
        (tmp_path / "dead").unlink()
        server.until(lambda: predicts(server))
        assert server.children["psc-front-0"] == before["psc-front-0"]
    (tmp_path / "dead").touch()
    with serve_fake("--workers=2", f"state={tmp_path}", ready=False) as server:  # Not if it never worked.
        assert server.end() == 1


def test_an_engine_that_somebody_else_ends_is_replaced() -> None:
    with serve_fake("--workers=1", "--drain-seconds=1") as server:
        before = server.children
        os.kill(before["psc-engine"], signal.SIGTERM)
        server.wait_for_log("engine has ended (0) and is replaced")
        server.wait_ready()
        assert server.children["psc-front-0"] == before["psc-front-0"]
        assert server.children["psc-engine"] != before["psc-engine"]
        assert server.terminate() == 0


def test_an_engine_that_somebody_ends_before_it_is_ready_ends_the_service_with_1(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    with serve_fake("--workers=1", "--drain-seconds=1", f"state={tmp_path}", ready=False) as server:
        server.until((tmp_path / "hanging").exists)
        children = server.children
        os.kill(children["psc-engine"], signal.SIGTERM)
        assert server.end() == 1
        last = json.loads(server.log[-1])
        assert last["level"] == "critical" and "the engine was ended before it was ready" in last["message"]
        assert not any(map(is_alive, children.values()))


def test_the_parent_stops_listening_before_the_others_end(tmp_path: Path) -> None:
    flags = ("--drain-seconds=1000", "--deadline-seconds=1000")
    with serve_fake("--workers=2", "step=0.01", "linger=0.1", f"state={tmp_path}", *flags) as server:
        (tmp_path / "hang").touch()
        with connect(server) as client:
            client.sendall(whole())
            server.until((tmp_path / "hanging").exists)
            server.process.send_signal(signal.SIGTERM)

            def refused() -> bool:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", server.port)).close()
                    return False
                return True

            server.until(refused)
            assert server.process.poll() is None


def test_all_end_when_their_parent_is_killed() -> None:
    with serve_fake("--workers=2", "linger=0.1") as server:
        children = server.children.values()
        server.process.kill()
        server.until(lambda: not any(map(is_alive, children)))


def test_ctrl_c_on_a_terminal_which_all_processes_get_ends_in_order() -> None:
    statuses: list[int] = []

    def send() -> None:
        """Predict on one connection until an answer closes it."""
        with httpx.Client(timeout=GUARD_SECONDS) as client:
            is_open = True
            while is_open:
                answer = client.post(server.url + "/predict", content=png(1), headers=PNG)
                statuses.append(answer.status_code)
                is_open = answer.headers.get("connection") != "close"

    with serve_fake("--workers=2", "linger=5") as server, meanwhile(send):
        server.until(lambda: len(statuses) > 3)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.end() == 0
    assert not server.count_in_log("Traceback"), "".join(server.log)
    assert set(statuses) == {200}


def test_images_that_find_no_place_in_the_shared_memory_are_refused(tmp_path: Path) -> None:
    # The memory has two pages, and each of these requests takes one.
    flags = ("--workers=1", "--max-body-bytes=1000", "--max-pixels=64", "--max-buffered-bytes=8192")
    with serve_fake(*flags, "step=0.01", f"state={tmp_path}", "--deadline-seconds=1000", "--drain-seconds=1") as server:
        (tmp_path / "hang").touch()
        clients: list[socket.socket] = []

        def is_refused() -> bool:
            clients.append(connect(server))
            clients[-1].sendall(whole())
            return 'psc_rejected_total{reason="too-many-requests"}' in server.metrics()

        server.until(is_refused)
        for client in clients:
            client.close()


def test_a_body_that_is_too_large_for_a_front_is_read_by_the_engine() -> None:
    # Of 2 GiB each front may hold 128 MiB, so bodies of half of that, and the engine four times as much.
    with serve_fake("--workers=2", "--max-body-bytes=100000000", "--max-pixels=64", f"memory={2 << 30}") as server:
        for padding in (1_000, 70_000_000):
            body = many(png(3)) + b" " * padding
            for content in (body, iter([body])):  # The second does not say how long it is.
                answer = HTTP.post(server.url + "/predict", content=content, headers=JSON)
                assert (answer.status_code, len(answer.json()["predictions"])) == (200, 1)
        decoded = [line for line in server.metrics().splitlines() if line.startswith("psc_decode_seconds_count")]
        assert decoded == ['psc_decode_seconds_count{model="m"} 4.0']


def test_the_deadline_begins_once_the_body_has_come() -> None:
    with serve_fake("--workers=1", "--deadline-seconds=2") as server, connect(server) as client:
        client.sendall(whole()[:-10])
        time.sleep(2.5)
        client.sendall(whole()[-10:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_slow_clients_take_no_place(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(40):  # Bodies that do not come.
            client = stack.enter_context(connect(server))
            client.sendall(whole()[:-10])
        began = time.monotonic()
        assert [predict(server).status_code for _ in range(5)] == [200] * 5
        assert time.monotonic() - began < 60


@pytest.mark.anyio
async def test_every_request_of_many_clients_gets_its_own_answer(server: Server) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> None:
        greys = random.Random(number).choices(range(200), k=number % 7 + 1)
        body = many(*map(png, greys))
        answer = await client.post(server.url + "/predict", content=body, headers=JSON)
        labels = [each["label"] for each in answer.json()["predictions"]]
        assert labels == ["dark" if grey < 64 else "middle" if grey < 192 else "bright" for grey in greys]

    async with httpx.AsyncClient(timeout=GUARD_SECONDS) as client:
        await asyncio.gather(*(ask(client, number) for number in range(150)))


async def live(front: Front, before_the_end: Callable[[], Awaitable[None]] | None = None) -> list[str]:
    """What a front says when it is told to start and, after something else, to end."""
    asked, said = iter(["lifespan.startup", "lifespan.shutdown"]), list[str]()

    async def receive() -> dict[str, Any]:
        kind = next(asked)
        if kind == "lifespan.shutdown" and before_the_end is not None:
            await before_the_end()
        return {"type": kind}

    async def send(message: Any) -> None:
        said.append(message["type"])

    await front({"type": "lifespan"}, receive, send)
    return said


@pytest.mark.anyio
async def test_a_front_that_is_to_end_waits_for_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.front._MEET_SECONDS", None)  # without limit
    place = Place.make(0, 1 << 16)
    front = Front(Settings(), KEYS, Board(1), place, on_start=lambda: front.stop_waiting())
    async with asyncio.timeout(GUARD_SECONDS):
        said = await live(front)
    place.close()
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.anyio
async def test_a_front_without_a_file_descriptor_still_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    place, board, measured = Place.make(0, 1 << 16), Board(1), 0

    def measure() -> int:
        nonlocal measured
        measured += 1
        if measured > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return 0

    monkeypatch.setattr("app.front.resident_bytes", measure)
    front = Front(Settings(), KEYS, board, place, on_start=lambda: front.stop_waiting())

    async def beats() -> None:
        await until(lambda: measured > 1, GUARD_SECONDS)
        failed = float(board.beats[0])
        await until(lambda: board.beats[0] > failed, GUARD_SECONDS)

    await live(front, beats)
    place.close()


@pytest.mark.anyio
async def test_a_front_whose_parent_and_engine_were_killed_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    place, board, statuses = Place.make(0, 1 << 16), Board(1), list[int]()
    front = Front(Settings(), KEYS, board, place, on_start=lambda: None)
    came: deque[Any] = deque()
    engine = Channel(place.engine, came.append)

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/model", "headers": [], "query_string": b""}
        asking = asyncio.create_task(front(scope, nothing, send))
        await until(lambda: any(message[0] == CALL for message in came), GUARD_SECONDS)
        board.beats[-1] = time.monotonic() - 60  # A parent would notice.
        await asyncio.sleep(0.2)
        assert not statuses
        front.is_orphan = True
        await asyncio.wait_for(asking, GUARD_SECONDS)

    async def nothing() -> dict[str, Any]:
        await asyncio.sleep(GUARD_SECONDS)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    engine.send(MODELS, board.engine, [], [])
    await live(front, ask)
    engine.close()
    place.close()
    assert statuses == [503]


@pytest.mark.anyio
async def test_a_front_alone_answers_as_the_application_does() -> None:
    place, origin = Place.make(0, 1 << 16), {"origin": "https://page.example"}
    documents: dict[str, Any] = {
        "/healthz": {"status": "ok"},
        "/v2/health/live": {"live": True},
        "/readyz": {"status": "not ready", "reasons": {"service": "the engine is being replaced"}},
        "/v2/health/ready": {"live": True, "ready": False},
        "/v2/models/m/ready": {"name": "m", "ready": False},
        "/v2/models/m/versions/v1/ready": {"name": "m", "ready": False},
    }
    front = Front(Settings(cors_origins=(origin["origin"],)), KEYS, Board(1), place, on_start=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://test") as client:
        answers = [await client.get(path, headers=origin) for path in (*documents, "/predict")]
    place.close()
    assert [answer.status_code for answer in answers] == [200, 200, 503, 503, 503, 503, 503]
    assert [answer.json() for answer in answers[:-1]] == [*documents.values()]
    assert answers[-1].json()["type"] == "urn:psc:problem:engine-lost"
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == origin["origin"]
        assert len(answer.headers["traceresponse"].split("-")) == 4


@pytest.mark.anyio
async def test_a_new_front_ends_the_requests_whose_images_are_in_its_memory(
    device_thread: None, monkeypatch: pytest.MonkeyPatch, app: Running
) -> None:
    place = Place.make(0, 1 << 16)
    calls, front = FrontCalls(app.app, place, 1), Channel(place.front, lambda _: None)
    monkeypatch.setattr("app.service.SWEEP_SECONDS", GUARD_SECONDS)
    await asyncio.sleep(0.1)  # From now on nobody looks for clients that have left.
    app.model.pipeline.check.clear()
    steps = len(app.model.pipeline.sizes)

    def ask(number: int) -> None:
        shape, query = (1, *PREPROCESS.shape), QUERY().model_dump(exclude_none=True)
        taken = Taken(None, app.model.version, shape, 0, ((1, None, number),), query, time.monotonic(), 0.0)
        about = {"type": "http", "method": "POST", "path": "/predict"}
        front.send(CALL, number, 1, about, [], time.perf_counter(), tuple(taken), None)

    ask(1)
    await until(lambda: len(app.model.pipeline.sizes) > steps)
    ask(2)
    await until(lambda: app.pending == 1)
    front.send(HELLO)
    await until(lambda: app.pending == 0)
    await until(lambda: app.service.inflight == 0)
    front.close()
    calls.close()
    place.close()


def test_an_engine_counts_as_ready_before_any_answer_says_so() -> None:
    board = Board(1)
    host = EngineHost("", 0.0, KEYS, -1, board)
    assert board.ready_engine != board.engine
    host.models_loaded(cast("Service", SimpleNamespace(registry=SimpleNamespace(served=()))))
    assert board.ready_engine == board.engine
