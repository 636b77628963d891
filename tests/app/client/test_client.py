"""The client and ``psc-predict`` against a scripted service."""

import asyncio
import copy
import gc
import io
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from app.client import (
    AsyncClient,
    BadAnswer,
    ClassificationResponse,
    Client,
    ClientError,
    ConnectionFailed,
    InputError,
    NotAllowed,
    Overloaded,
    ProblemError,
    Refused,
    RegressionResponse,
    Response,
    Retry,
    ServerFailed,
    Unavailable,
    retry_after_seconds,
)
from app.client_cli import main
from psc_core.errors import ExitCode
from tests.app.client.support import MODEL, TRACERESPONSE, Script, answer, numbers, problem
from tests.app.fakes import png
from tests.app.live import live_server

RETRY = Retry()
Send = Callable[..., ClassificationResponse]


def send_sync(script: Script, *images: Any, retry: Retry = RETRY, **options: Any) -> ClassificationResponse:
    with Client("http://host/prefix", api_key="key", retry=retry, transport=script.transport) as client:
        return client.predict(images or [b"image"], **options)


def send_async(script: Script, *images: Any, retry: Retry = RETRY, **options: Any) -> ClassificationResponse:
    async def send() -> ClassificationResponse:
        transport = script.transport
        async with AsyncClient("http://host/prefix/", api_key="key", retry=retry, transport=transport) as client:
            return await client.predict(images or [b"image"], **options)

    return asyncio.run(send())


@pytest.fixture(params=[send_sync, send_async], ids=["sync", "async"])
def send(request: pytest.FixtureRequest) -> Send:
    function: Send = request.param
    return function


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []

    def sleep(value: float) -> None:
        if value:  # Not the one before the first attempt.
            seconds.append(value)

    async def sleep_async(value: float) -> None:
        sleep(value)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(asyncio, "sleep", sleep_async)
    return seconds


def test_request_and_typed_answer(send: Send, tmp_path: Path) -> None:
    file = tmp_path / "sieben.png"
    file.write_bytes(b"PNG from a file")
    script = Script(answer(2))
    options = {"model": "a/b", "top_k": 3, "alpha": 0.01, "ambiguity_threshold": 0.5}
    result = send(script, b"bytes", file, **options, explain=True, map=True, monitor=False)
    assert (result.model.name, result.model.layer, result.policy.alpha) == ("mnist", "layer3", 0.05)
    first, second = result.predictions
    assert first == second
    assert (first.label, first.probabilities, first.prediction_set) == ("7", [0.03, 0.97], ["7"])
    (request,) = script.requests
    path, query = request.url.raw_path.split(b"?")
    assert path == b"/prefix/models/a%2Fb/predict"
    assert query == b"top_k=3&alpha=0.01&ambiguity_threshold=0.5&explain=true&map=true&monitor=false"
    assert request.headers["x-api-key"] == "key"
    body = request.content
    assert body.index(b"bytes") < body.index(b"PNG from a file")
    assert body.count(b'name="images"') == 2
    assert b'filename="sieben.png"' in body


def test_a_model_of_any_task_can_be_asked() -> None:
    script = Script(answer(), numbers(), answer(), numbers())

    async def ask() -> list[Response]:
        async with AsyncClient(transport=script.transport) as client:
            return [await client.ask([b"image"], max_width=2.0, top_k=None), await client.ask([b"image"])]

    with Client(transport=script.transport) as client:
        asked = [client.ask([b"image"], max_width=2.0, top_k=None), client.ask([b"image"], model="a", explain=True)]
    assert [type(each) for each in asked] == [ClassificationResponse, RegressionResponse]
    assert [request.url.raw_path for request in script.requests] == [
        b"/predict?max_width=2.0", b"/models/a/predict?explain=true",
    ]  # fmt: skip
    assert asyncio.run(ask()) == asked


def test_an_answer_of_another_task_names_the_method() -> None:
    script = Script(answer(), numbers())
    with Client(transport=script.transport) as client:
        with pytest.raises(BadAnswer, match=r"use predict$"):
            client.predict_values([b"image"])
        with pytest.raises(BadAnswer, match=r"use predict_values$"):
            client.predict([b"image"])


def test_retry_after_is_honoured(send: Send, waits: list[float]) -> None:
    script = Script(problem(429, {"Retry-After": "3"}), problem(503, {"Retry-After": "1"}), answer())
    assert len(send(script).predictions) == 1
    assert waits == [3.0, 1.0]
    assert [request.content.count(b"\r\n\r\nimage\r\n") for request in script.requests] == [1, 1, 1]


def test_without_retry_after_waits_double_with_jitter(send: Send, waits: list[float]) -> None:
    send(Script(problem(503), problem(503), problem(503), answer()), retry=Retry(base_wait_s=1.0))
    assert all(low <= wait <= 2 * low for wait, low in zip(waits, (0.5, 1.0, 2.0), strict=True))


def test_attempts_are_bounded(send: Send, waits: list[float]) -> None:
    script = Script(*[problem(429, {"Retry-After": "2"})] * 3)
    with pytest.raises(Overloaded) as caught:
        send(script, retry=Retry(attempts=3))
    assert (len(script.requests), waits) == (3, [2.0, 2.0])
    assert caught.value.retry_after_s == 2.0
    with pytest.raises(Unavailable):
        send(Script(problem(503, {"Retry-After": "3600"})))  # At once.
    assert waits == [2.0, 2.0]


def test_connection_errors_are_retried_only_when_nothing_was_sent(send: Send, waits: list[float]) -> None:
    for kind in (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
        assert send(Script(kind("refused"), answer())).model.name == "mnist"
    assert len(waits) == 3
    with pytest.raises(ConnectionFailed):
        send(Script(httpx.ReadTimeout("")))
    with pytest.raises(ConnectionFailed):
        send(Script(*[httpx.ConnectError("refused")] * 2), retry=Retry(attempts=2))


@pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp.*try_connect' was never awaited:RuntimeWarning")
def test_cancelled_calls_leave_room_for_others() -> None:
    """Cancelled at every point of a call, and more often at each than there may be connections."""

    async def call(url: str) -> str:
        transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=3))
        async with AsyncClient(url, retry=Retry(attempts=1), timeout_s=10.0, transport=transport) as client:
            for turns in range(20):
                for _ in range(4):
                    task = asyncio.create_task(client.model())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            name: str = (await client.model())["name"]
            return name

    with live_server() as url:
        assert asyncio.run(call(url)) == "m"
    gc.collect()  # anyio forgets the coroutine of a connection that is cancelled before it begins.


def test_a_call_cancelled_while_it_waits_for_a_connection_is_not_sent() -> None:
    async def call() -> tuple[int, int]:
        answered, sent = asyncio.Event(), []

        async def answer_later(request: httpx.Request) -> httpx.Response:
            sent.append(request)
            await answered.wait()
            return httpx.Response(200, json={})

        async with AsyncClient(transport=httpx.MockTransport(answer_later)) as client:
            calls = [asyncio.create_task(client.model()) for _ in range(103)]
            while len(sent) < 100:
                await asyncio.sleep(0)
            calls[101].cancel()
            answered.set()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return outcomes.count({}), len(sent)

    assert asyncio.run(call()) == (102, 102)


def test_a_full_pool_is_not_called_an_absent_service(send: Send, waits: list[float]) -> None:
    with pytest.raises(ConnectionFailed, match="fewer calls at once"):
        send(Script(httpx.PoolTimeout("")), retry=Retry(attempts=1))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, Refused), (401, NotAllowed), (403, NotAllowed)),
        *((500, ServerFailed), (502, ServerFailed), (504, Unavailable)),
    ],
)
def test_problems_raise_by_kind_and_are_not_retried(send: Send, status: int, kind: type[ProblemError]) -> None:
    reply = problem(status, {"traceresponse": TRACERESPONSE}, index=1, filename="b.png")
    with pytest.raises(kind) as caught:
        send(Script(reply))
    error = caught.value
    assert (error.status, error.title, error.detail, error.type) == (status, "Kind", "what was wrong", "urn:x")
    assert (error.index, error.filename, error.trace_id) == (1, "b.png", TRACERESPONSE.split("-")[1])


@pytest.mark.parametrize("through", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_travel_between_processes(through: Callable[[ClientError], ClientError]) -> None:
    with Client(transport=Script(problem(422, index=1)).transport) as client, pytest.raises(Refused) as caught:
        client.model()
    for error in (caught.value, InputError("absent", 1), ConnectionFailed("gone")):
        again = through(error)
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_errors_without_a_problem_document(send: Send) -> None:
    with pytest.raises(ServerFailed):
        send(Script(httpx.Response(502, text="<html>proxy</html>")))
    with pytest.raises(Refused):
        send(Script(httpx.Response(499, json=["list"])))
    with pytest.raises(Refused):
        send(Script(httpx.Response(422, text="[" * 100_000)))


@pytest.mark.parametrize(
    "body",
    [{"text": "hello"}, {"text": "[" * 100_000}, {"json": [1]}, {"json": {}}, {"json": {"model": MODEL, "policy": 1}}],
)
def test_answers_of_another_service(send: Send, body: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer, match="check the URL"):
        send(Script(httpx.Response(200, **body)))


@pytest.mark.parametrize("status", [301, 302, 304, 307, 308])
def test_a_redirect_names_its_target(send: Send, status: int) -> None:
    with pytest.raises(BadAnswer, match="https://elsewhere/predict"):
        send(Script(httpx.Response(status, headers={"location": "https://elsewhere/predict"})))


def test_rejects_bad_input_before_sending(send: Send, tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(InputError, match="absent"):
        send(script, tmp_path / "absent.png")
    with pytest.raises(TypeError, match="topk"):
        send(script, topk=3)
    with Client(transport=script.transport) as client:
        with pytest.raises(InputError):
            client.predict([])
        with pytest.raises(InputError):
            client.predict("image.png")
        for name in ("", ".", ".."):  # httpx would ask /predict in place of /models/../predict.
            with pytest.raises(InputError):
                client.model(name)
            with pytest.raises(InputError):
                client.predict([b"image"], model=name)
    for url in ("localhost:8000", "http://[::1", "http://a..b", "http://", f"http://{'a' * 64}.org"):
        with pytest.raises(InputError):
            Client(url)
    for key in ("schlüssel", "two\nlines", " secret", "secret ", " "):  # h11 would quote the last ones.
        for client_type in (Client, AsyncClient):
            with pytest.raises(InputError) as caught:
                client_type(api_key=key)
            assert "secret" not in str(caught.value)
    with pytest.raises(ValueError):
        Retry(attempts=0)
    assert script.requests == []


def test_images_are_paths_or_bytes(send: Send, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"a\nb")
    script = Script(answer(3))
    send(script, bytearray(b"array"), memoryview(b"view"), file)
    assert all(data in script.requests[0].content for data in (b"array", b"view", b"a\nb"))
    for image in (io.BytesIO(b"file"), Image.new("L", (2, 2)), np.zeros((2, 2)), None, "a\0b"):
        with pytest.raises(InputError, match="expected the path of a file or its bytes") as caught:
            send(script, b"first", image)
        assert caught.value.index == 1
    with Client(transport=script.transport) as client, open(file, "rb") as opened:
        for alone in (opened, Image.new("L", (2, 2)), bytearray(b"x"), memoryview(b"x"), None):
            with pytest.raises(InputError, match="put it into a list"):
                client.predict(alone)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="the path of a file or its bytes, got ndarray"):
            client.predict(np.zeros((2, 2)))  # type: ignore[arg-type]
    assert len(script.requests) == 1


def test_the_password_of_a_url_is_not_printed() -> None:
    secret = "http://me:secret@host"
    for reply in (httpx.ReadTimeout(""), httpx.Response(200, text="hello")):
        with Client(secret, transport=Script(reply).transport) as client, pytest.raises(ClientError) as failed:
            client.model()
        assert "host/model" in str(failed.value) and "secret" not in str(failed.value)
    for url in ("ftp://me:secret@host", "http://me:secret@[::1"):
        with pytest.raises(InputError) as refused:
            Client(url)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("HTTP_PROXY", "ftp://proxy"), ("HTTP_PROXY", "http://me:secret@[::1"), ("NO_PROXY", "[::1]")),
        *(("SSL_CERT_FILE", "absent.pem"), ("SSL_CERT_FILE", __file__)),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy")  # So that NO_PROXY is read.
    monkeypatch.setenv(name, value)
    for client_type in (Client, AsyncClient):
        with pytest.raises(InputError, match=name) as caught:
            client_type()
        assert "secret" not in str(caught.value)
    assert main(["x.png"], environment={}) == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("variables", "is_asked"),
    [
        ({"HTTP_PROXY": "http://me:secret@127.0.0.1:1"}, True),
        ({"ALL_PROXY": "http://127.0.0.1:1"}, True),
        ({"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1"}, False),
        ({"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1:2"}, False),
        ({"HTTPS_PROXY": "http://127.0.0.1:1"}, False),
        ({}, False),
    ],
)
def test_a_proxy_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_asked: bool
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name.lower(), value)
    url = "http://127.0.0.1:2"
    with Client(url, retry=Retry(attempts=1)) as client, pytest.raises(ConnectionFailed) as caught:
        client.model()
    assert "is the service running there?" in str(caught.value)
    assert ("the proxy of the environment" in str(caught.value)) == is_asked
    assert "secret" not in str(caught.value)


def test_sends_file_names_that_are_not_text(send: Send, tmp_path: Path) -> None:
    file = tmp_path / "\udcff.png"
    file.write_bytes(b"image")
    script = Script(answer())
    send(script, file)
    assert b'filename="?.png"' in script.requests[0].content


def test_model_summary(send: Send) -> None:
    reply = httpx.Response(200, json={"name": "mnist"})
    script = Script(reply, reply)
    with Client(transport=script.transport) as client:
        assert client.model() == client.model("a/b") == {"name": "mnist"}
    assert [request.url.raw_path for request in script.requests] == [b"/model", b"/models/a%2Fb"]


def test_retry_after_forms() -> None:
    assert retry_after_seconds("7") == 7.0
    assert retry_after_seconds(None) is None
    assert retry_after_seconds("soon") is None
    assert retry_after_seconds(f"Mon, {'9' * 20} Jan 2020 00:00:00 GMT") is None
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    assert 15 < (retry_after_seconds(later) or 0) <= 20
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 -0000") == 0.0


def test_imports_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys, app.client, app.client_cli\n"
        "bad = {'torch', 'fastapi', 'starlette', 'uvicorn', 'numpy', 'PIL'} & set(sys.modules)\n"
        "raise SystemExit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_against_the_real_service(tmp_path: Path) -> None:
    (tmp_path / "bright.png").write_bytes(png(255))
    with live_server(api_keys=("key",)) as url:
        with Client(url, api_key="key") as client:
            result = client.predict([png(0), tmp_path / "bright.png"], alpha=0.3, explain=True)
            assert [prediction.label for prediction in result.predictions] == ["dark", "bright"]
            assert (result.model.version, result.policy.alpha) == ("v1", 0.3)
            assert result.predictions[0].explanation is not None
            top = client.predict([png(0)], model="m", top_k=1).predictions[0].top
            assert top is not None
            assert [each.label for each in top] == ["dark"]
            assert client.model()["classes"] == ["dark", "middle", "bright"]
            with pytest.raises(Refused) as refused:
                client.predict([png(0), b"no image"])
            assert (refused.value.status, refused.value.index, refused.value.filename) == (415, 1, "image-1")
            assert len(refused.value.trace_id or "") == 32
        with Client(url) as stranger, pytest.raises(NotAllowed):
            stranger.predict([png(0)])
