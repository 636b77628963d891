"""The client and ``psc-predict`` against a scripted service."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import client_cli
from app.client import (
    AsyncClient,
    BadAnswer,
    Client,
    ConnectionFailed,
    InputError,
    NotAllowed,
    Overloaded,
    PredictResult,
    ProblemError,
    Refused,
    Retry,
    ServerFailed,
    Unavailable,
)
from app.client.errors import retry_after_seconds
from tests.app.fakes import png
from tests.app.live import live_server

PREDICTION = {
    "label": "7",
    "class_index": 7,
    "confidence": 0.97,
    "probabilities": [0.03, 0.97],
    "predictive_entropy": 0.12,
    "log_density": -41.2,
    "ood_score": 41.2,
    "ood_p_value": 0.63,
    "epistemic": 0.01,
    "is_ood": False,
    "decision": "accept",
    "prediction_set": ["7"],
    "a_later_version_adds_this": 1,
}
POLICY = {"alpha": 0.05, "ambiguity_threshold": 1.0, "coverage": 0.95}
MODEL = {"name": "mnist", "version": "abc", "layer": "layer3"}
TRACERESPONSE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
RETRY = Retry()
Reply = httpx.Response | Exception


def answer(count: int = 1) -> httpx.Response:
    return httpx.Response(200, json={"model": MODEL, "policy": POLICY, "predictions": [PREDICTION] * count})


def problem(status: int, headers: dict[str, str] | None = None, **extra: Any) -> httpx.Response:
    document = {"type": "urn:x", "title": "Kind", "status": status, "detail": "what was wrong", **extra}
    return httpx.Response(status, json=document, headers=headers)


class Script:
    """A service that gives the next scripted reply to each request, and remembers the requests."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []

    def reply(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.reply)


Send = Callable[..., PredictResult]


def send_sync(script: Script, *images: Any, retry: Retry = RETRY, **options: Any) -> PredictResult:
    with Client("http://host/prefix", api_key="key", retry=retry, transport=script.transport) as client:
        return client.predict(images or [b"image"], **options)


def send_async(script: Script, *images: Any, retry: Retry = RETRY, **options: Any) -> PredictResult:
    async def send() -> PredictResult:
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
    """Waits are recorded instead of waited."""
    seconds: list[float] = []

    async def sleep(value: float) -> None:
        seconds.append(value)

    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    return seconds


def test_an_answer_is_typed_and_the_request_carries_everything(send: Send, tmp_path: Path) -> None:
    file = tmp_path / "sieben.png"
    file.write_bytes(b"PNG from a file")
    script = Script(answer(2))
    result = send(script, b"bytes", file, model="a/b", top_k=3, alpha=0.01, ambiguity_threshold=0.5, explain=True)
    assert (result.model.name, result.model.layer, result.policy.alpha) == ("mnist", "layer3", 0.05)
    first, second = result.predictions
    assert first == second
    assert (first.label, first.probabilities, first.prediction_set) == ("7", (0.03, 0.97), ("7",))
    (request,) = script.requests
    assert (
        request.url.raw_path == b"/prefix/models/a%2Fb/predict?top_k=3&alpha=0.01&ambiguity_threshold=0.5&explain=true"
    )
    assert request.headers["x-api-key"] == "key"
    body = request.content
    assert body.index(b"bytes") < body.index(b"PNG from a file")
    assert body.count(b'name="images"') == 2
    assert b'filename="sieben.png"' in body


def test_top_k_answers_are_typed(send: Send) -> None:
    reply = answer()
    document = json.loads(reply.content)
    del document["predictions"][0]["probabilities"]
    document["predictions"][0]["top"] = [{"label": "7", "probability": 0.97}]
    (prediction,) = send(Script(httpx.Response(200, json=document))).predictions
    assert prediction.top == (("7", 0.97),)
    assert prediction.probabilities == ()


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


def test_a_long_retry_after_raises_at_once(send: Send, waits: list[float]) -> None:
    with pytest.raises(Unavailable):
        send(Script(problem(503, {"Retry-After": "3600"})))
    assert waits == []


def test_connection_errors_are_retried_only_when_nothing_was_sent(send: Send, waits: list[float]) -> None:
    assert send(Script(httpx.ConnectError("refused"), answer())).model.name == "mnist"
    assert len(waits) == 1
    with pytest.raises(ConnectionFailed, match=r"http://host/prefix/predict.*is the service running"):
        send(Script(httpx.ReadTimeout("")))
    with pytest.raises(ConnectionFailed, match="refused"):
        send(Script(*[httpx.ConnectError("refused")] * 2), retry=Retry(attempts=2))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Refused),
        (413, Refused),
        (422, Refused),
        (401, NotAllowed),
        (403, NotAllowed),
        (500, ServerFailed),
        (502, ServerFailed),
        (504, Unavailable),
    ],
)
def test_problems_raise_by_kind_and_are_not_retried(send: Send, status: int, kind: type[ProblemError]) -> None:
    reply = problem(status, {"traceresponse": TRACERESPONSE}, index=1, filename="b.png")
    with pytest.raises(kind) as caught:
        send(Script(reply))
    error = caught.value
    assert (error.status, error.title, error.detail, error.type) == (
        status,
        "Kind",
        "what was wrong",
        "urn:x",
    )
    assert (error.index, error.filename) == (1, "b.png")
    assert error.trace_id == TRACERESPONSE.split("-")[1]
    assert str(error) == f"{status} Kind: what was wrong"


def test_an_error_that_is_no_problem_document_still_raises_clearly(send: Send) -> None:
    with pytest.raises(ServerFailed, match="502 Bad Gateway: <html>"):
        send(Script(httpx.Response(502, text="<html>proxy</html>")))
    with pytest.raises(Refused, match="499 Error"):
        send(Script(httpx.Response(499, json=["list"])))


@pytest.mark.parametrize("status", [200, 422])
def test_an_answer_nested_without_end_is_no_answer(send: Send, status: int) -> None:
    with pytest.raises(BadAnswer if status == 200 else Refused):
        send(Script(httpx.Response(status, text="[" * 100_000)))


@pytest.mark.parametrize(
    "body", [{"text": "hello"}, {"json": [1]}, {"json": {}}, {"json": {"model": MODEL, "policy": 1}}]
)
def test_an_answer_of_another_service_is_named(send: Send, body: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer, match="check the URL"):
        send(Script(httpx.Response(200, **body)))


def test_bad_input_is_refused_before_anything_is_sent(send: Send, tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(InputError, match="absent"):
        send(script, tmp_path / "absent.png")
    with Client(transport=script.transport) as client:
        with pytest.raises(InputError, match="at least one image"):
            client.predict([])
        with pytest.raises(InputError, match="a list of images"):
            client.predict("image.png")
    for url in ("localhost:8000", "http://[::1"):
        with pytest.raises(InputError, match=re.escape(f"got {url!r}")):
            Client(url)
    for key in ("schlüssel", "two\nlines"):
        with pytest.raises(InputError, match="no header can carry"):
            Client(api_key=key)
    with pytest.raises(ValueError, match="at least 1 attempt"):
        Retry(attempts=0)
    assert script.requests == []


def test_a_file_name_that_is_not_text_is_sent(send: Send, tmp_path: Path) -> None:
    file = tmp_path / "\udcff.png"
    file.write_bytes(b"image")
    script = Script(answer())
    send(script, file)
    assert b'filename="?.png"' in script.requests[0].content


def test_the_model_summary(send: Send) -> None:
    reply = httpx.Response(200, json={"name": "mnist"})
    script = Script(reply, reply)
    with Client(transport=script.transport) as client:
        assert client.model() == client.model("a/b") == {"name": "mnist"}
    assert [request.url.raw_path for request in script.requests] == [b"/model", b"/models/a%2Fb"]


def test_retry_after_forms() -> None:
    assert retry_after_seconds("7") == 7.0
    assert retry_after_seconds(None) is None
    assert retry_after_seconds("soon") is None
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    assert 15 < (retry_after_seconds(later) or 0) <= 20
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 -0000") == 0.0


def test_the_client_imports_neither_the_core_nor_a_web_framework() -> None:
    code = (
        "import sys, app.client, app.client.cli\n"
        "bad = {'psc_core', 'torch', 'fastapi', 'starlette', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "raise SystemExit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def run_cli(script: Script, *arguments: str, environment: dict[str, str] | None = None) -> int:
    return client_cli.main(arguments, environment=environment or {}, transport=script.transport)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name in ("one.png", "two.png", "three.png"):
        (tmp_path / name).write_bytes(b"image")
    return [str(tmp_path / name) for name in ("one.png", "two.png", "three.png")]


@pytest.mark.parametrize(("flag", "kind"), [("--batch-size", "a positive integer"), ("--timeout", "a positive number")])
@pytest.mark.parametrize("value", ["0", "-1", "many", "nan"])
def test_cli_flags_say_what_they_want(capsys: pytest.CaptureFixture[str], flag: str, kind: str, value: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_cli(Script(), "one.png", f"{flag}={value}")
    assert f"expected {kind}, got '{value}'" in capsys.readouterr().err


def test_cli_prints_a_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(answer(2), answer(1))
    environment = {"PSC_CLIENT_URL": "http://elsewhere:1", "PSC_CLIENT_API_KEY": "secret"}
    assert run_cli(script, *files, "--batch-size", "2", "--model", "m", environment=environment) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "image", "label", "confidence", "entropy", "log", "density", "p-value", "decision",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == files
    assert lines[1].split()[1:] == ["7", "0.970", "0.120", "-41.20", "0.6300", "accept"]
    assert len({line.index("accept") for line in lines[1:]}) == 1
    assert str(script.requests[0].url) == "http://elsewhere:1/models/m/predict"
    assert script.requests[0].headers["x-api-key"] == "secret"


def test_cli_prints_json_lines(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(answer(3)), *files, "--json") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["image"] for document in documents] == files
    assert documents[0]["model"] == MODEL
    assert documents[0]["prediction_set"] == ["7"]
    assert documents[0]["is_ood"] is False


@pytest.mark.parametrize(
    ("reply", "code"),
    [(problem(422), 2), (problem(401), 2), (httpx.ReadTimeout("slow"), 2), (problem(500), 1)],
)
def test_cli_exit_codes(files: list[str], capsys: pytest.CaptureFixture[str], reply: Reply, code: int) -> None:
    assert run_cli(Script(reply), *files) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("psc-predict: ")
    assert output.err.count("\n") == 1


def test_cli_bad_usage_ends_with_2(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(), "absent.png") == 2
    assert "absent.png" in capsys.readouterr().err
    assert run_cli(Script(), files[0], "--url", "nowhere") == 2
    for arguments in ([], [files[0], "--batch-size", "0"], [files[0], "--timeout", "inf"], ["--nonsense"]):
        with pytest.raises(SystemExit) as caught:
            run_cli(Script(), *arguments)
        assert caught.value.code == 2


def test_against_the_real_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bright.png").write_bytes(png(255))
    with live_server(api_keys=("key",)) as url:
        with Client(url, api_key="key") as client:
            result = client.predict([png(0), tmp_path / "bright.png"], alpha=0.3, explain=True)
            assert [prediction.label for prediction in result.predictions] == ["dark", "bright"]
            assert (result.model.version, result.policy.alpha) == ("v1", 0.3)
            assert result.predictions[0].explanation is not None
            top = client.predict([png(0)], model="m", top_k=1).predictions[0].top
            assert [label for label, _ in top] == ["dark"]
            assert client.model()["classes"] == ["dark", "middle", "bright"]
            with pytest.raises(Refused) as refused:
                client.predict([png(0), b"no image"])
            assert (refused.value.status, refused.value.index, refused.value.filename) == (415, 1, "image-1")
            assert len(refused.value.trace_id or "") == 32
        with Client(url) as stranger, pytest.raises(NotAllowed):
            stranger.predict([png(0)])
        environment = {"PSC_CLIENT_URL": url, "PSC_CLIENT_API_KEY": "key"}
        assert client_cli.main([str(tmp_path / "bright.png")], environment=environment) == 0
    assert "bright" in capsys.readouterr().out.splitlines()[1]
    assert client_cli.main([str(tmp_path / "bright.png")], environment={"PSC_CLIENT_URL": url}) == 2
