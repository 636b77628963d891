"""Allowed hosts and origins, limits on requests, errors as problems, draining, traces and the access log."""

import gzip
import logging
from typing import Any
from unittest.mock import Mock

import pytest

from app import errors
from app.errors import MAX_DETAIL, TABLE, ImageRefused, QueueFull, Unauthorized, problem_of
from app.http.middleware import ProblemResponses
from app.metrics import Metrics
from app.tracing import current_trace
from psc_core.errors import UndecodableImage
from tests.app.fakes import png
from tests.app.http.support import check_predictions, check_problem, hold
from tests.app.support import PNG, Running, running

pytestmark = pytest.mark.anyio


PROBES = [
    *("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"),
    "/v2/models/m/versions/v1/ready",
]

ASKED = {"access-control-request-method": "POST"}


async def test_hosts_and_origins() -> None:
    async with running(allowed_hosts="test", cors_origins="https://page.example") as app:
        assert (await app.client.get("/model")).status_code == 200
        for other in ("evil", "www.test"):
            assert (await app.client.get("/model", headers={"host": other})).status_code == 400
        response = await app.client.get("/healthz", headers={"origin": "https://page.example"})
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "Inference-Header-Content-Length" in response.headers["access-control-expose-headers"]
        response = await app.client.post("/predict", content=b"?", headers={"origin": "https://page.example"})
        assert response.status_code == 415
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        response = await app.client.get("/healthz", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_probes_are_answered_whatever_host_they_name() -> None:
    async with running(allowed_hosts="psc.example") as app:
        for path in PROBES:
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 200
        for path in ("/v2/models/m", "/v2/models/ready", "/v2/models/m/versions/ready"):
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "psc.example"})).status_code == 200


async def test_a_refused_preflight_is_a_problem() -> None:
    async with running(cors_origins=("https://good.example",)) as app:
        good = await app.client.options("/predict", headers={"origin": "https://good.example", **ASKED})
        assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://good.example")
        bad = await app.client.options("/predict", headers={"origin": "https://bad.example", **ASKED})
        assert (bad.status_code, bad.headers["content-type"]) == (400, "application/problem+json")
        assert bad.json()["type"] == "urn:psc:problem:cors" and "cors_origins" in bad.json()["detail"]
        assert int(bad.headers["content-length"]) == len(bad.content)


async def test_large_body_announced_or_not() -> None:
    async with running(max_body_bytes=1000) as app:
        response = await app.client.post("/predict", content=b"x" * 1001, headers=PNG)
        check_problem(response, 413, "body-too-large")
        assert response.headers["connection"] == "close"

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 100

        check_problem(await app.client.post("/predict", content=chunks(), headers=PNG), 413, "body-too-large")
        check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])


@pytest.mark.usefixtures("device_thread")
async def test_too_many_requests_at_once() -> None:
    async with running(max_requests=1) as app:
        first = await hold(app)
        response = await app.client.post("/predict", content=png(1), headers=PNG)
        check_problem(response, 429, "too-many-requests")
        assert int(response.headers["retry-after"]) >= 1
        for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"):
            assert (await app.client.get(path)).status_code == 200
        app.model.pipeline.check.set()
        check_predictions(await first, [5])
        assert await app.metric('psc_rejected_total{reason="too-many-requests"}') == 1


POSTS = ("/predict", "/v2/models/m/infer", "/admin/reload", "/v2/repository/index", "/v2/repository/models/m/load")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "GZIP", "identity, gzip", "x"])
async def test_a_compressed_body_is_refused_before_it_is_read(coding: str) -> None:
    async with running(admin_keys="key") as app:
        headers = {**PNG, "content-encoding": coding, "x-api-key": "key"}
        for path in POSTS:
            response = await app.client.post(path, content=gzip.compress(png(3)), headers=headers)
            assert response.status_code == 415 and response.headers["accept-encoding"] == "identity"
            assert f"Content-Encoding: {coding}" in response.text
        assert (await app.client.get("/healthz", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        *(("content-encoding", value, 200) for value in ("identity", "Identity", "", "identity, identity")),
        *(("content-length", value, 200) for value in ("x", "-1", "", "0" * 5000)),
        *(("content-length", value, 413) for value in ("0" * 5000 + "1001", "9" * 20, "9" * 5000)),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_what_headers_say_of_a_body_in_any_form(name: str, value: str, status: int) -> None:
    """Python refuses to read numbers of more than 4,300 digits, and servers let them through."""
    async with running(max_body_bytes=1000) as app:
        response = await app.client.post("/predict", content=png(3), headers={**PNG, name: value})
        assert response.status_code == status
        if status == 200:
            check_predictions(response, [3])


async def test_each_line_of_content_encoding_counts(app: Running) -> None:
    lines = [*PNG.items(), ("content-encoding", "identity"), ("content-encoding", "br")]
    check_problem(await app.client.post("/predict", content=b"", headers=lines), 415, "unsupported-encoding")


async def test_a_large_body_without_room_is_not_read() -> None:
    async with running(max_buffered_bytes=1 << 20) as app:

        async def chunks() -> Any:
            raise AssertionError("read")
            yield b""

        headers = {**PNG, "content-length": str(2 << 20)}
        check_problem(await app.client.post("/predict", content=chunks(), headers=headers), 429, "too-many-requests")
        check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])


async def test_an_internal_error_tells_the_client_nothing(caplog: pytest.LogCaptureFixture, app: Running) -> None:
    object.__setattr__(app.service.registry.get(), "predict", Mock(side_effect=RuntimeError("secret detail")))
    response = await app.client.post("/predict", content=png(1), headers=PNG)
    check_problem(response, 500, "internal")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


SCOPE = {"type": "http", "path": "/predict", "headers": []}


async def send_through(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What is sent when an application sends these messages and then fails."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        raise RuntimeError("too late")

    async def send(message: Any) -> None:
        sent.append(message)

    await ProblemResponses(app, metrics=Metrics())(SCOPE, None, send)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("path", ["/predict", "/models/m/predict", "/predict?top_k=2"])
async def test_every_way_to_predict_answers_and_counts_alike(path: str, app: Running) -> None:
    first, second = [await app.client.post(path, content=png(7), headers=PNG) for _ in range(2)]
    other = await app.client.post(path, content=b"?", headers=PNG)
    route = "/models/{name}/predict" if "models" in path else "/predict"
    counted = (await app.client.get("/metrics")).text
    assert first.json() == second.json()
    assert first.json()["predictions"][0]["label"] == "dark"
    check_problem(other, 415, "unsupported-image")
    for status, count in ((200, 2), (415, 1)):
        assert f'psc_request_seconds_count{{route="{route}",status="{status}"}} {count}.0' in counted
    assert (await app.client.get("/predict")).status_code == 405
    assert (await app.client.options("/predict")).status_code == 405


@pytest.mark.parametrize("prefix", ["", "/psc"])
async def test_what_is_refused_before_routing_counts_for_its_route(prefix: str) -> None:
    async with running(root_path=prefix) as app:
        for path in ("/predict", "/v2/models/m/infer", "/nowhere"):
            refused = await app.client.post(path, content=b"?", headers={**PNG, "content-encoding": "gzip"})
            assert refused.status_code == 415
        for route in ("/predict", "/v2/models/{name}/infer", "unmatched"):
            assert await app.metric(f'psc_request_seconds_count{{route="{route}",status="415"}}') == 1


async def test_error_within_the_answer_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="too late"):
        await send_through({"type": "http.response.start", "status": 200, "headers": []})
    assert "failed while it was answered" in caplog.text


async def test_error_after_the_answer_is_dropped() -> None:
    messages = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": b"x"},
    ]
    assert await send_through(*messages) == messages


async def test_unknown_paths_and_methods_are_problems_under_one_metric(app: Running) -> None:
    for method, path, status in (("GET", "/x", 404), ("GET", "/predict", 405), ("GET", "/" + "y" * 50, 404)):
        response = await app.client.request(method, path)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"
    assert await app.metric('psc_request_seconds_count{route="unmatched",status="404"}') == 2


@pytest.mark.parametrize("path", ["/predict", "/models/m/predict", "/v2/models/m/infer", "/admin/reload"])
async def test_a_line_end_is_no_part_of_a_path(path: str) -> None:
    async with running(admin_keys="root") as app:
        headers = {**PNG, "x-api-key": "root"}
        check = await app.client.post(path + "%0a", content=png(0), headers=headers)
        assert check.status_code == 404


@pytest.mark.parametrize("access_log", [True, False])
async def test_the_trace_is_continued_and_the_access_logged(caplog: pytest.LogCaptureFixture, access_log: bool) -> None:
    caplog.set_level(logging.INFO)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with running(access_log=access_log) as app:
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        response = await app.client.get("/healthz", headers=headers)
    assert response.headers["traceresponse"].split("-")[1] == trace_id
    assert current_trace.get() is None
    records = [vars(record) for record in caplog.records if record.message == "request"]
    assert [(record["method"], record["path"], record["status"]) for record in records] == (
        [("GET", "/healthz", 200)] if access_log else []
    )


DESIGNED = {
    "MalformedRequest": 400, "Unauthorized": 401, "BodyTooLarge": 413, "TooManyImages": 413, "ImageTooLarge": 413,
    "UnsupportedMedia": 415, "UnsupportedImage": 415, "UndecodableImage": 422, "QueueFull": 429, "NotReady": 503,
    "DeviceError": 503, "DeadlineExceeded": 504,
}  # fmt: skip


def test_every_service_error_is_in_the_table() -> None:
    by_name = {kind.__name__: status for kind, (status, _, _) in TABLE.items()}
    assert by_name.items() >= DESIGNED.items()
    own = set(errors.ServiceError.__subclasses__()) | set(errors.Overloaded.__subclasses__())
    # The last two have another error's answer.
    assert own - {errors.Overloaded, ImageRefused, errors.RefusedByFront} <= set(TABLE)


def test_headers() -> None:
    assert problem_of(QueueFull("x", retry_after=7))[1] == {"retry-after": "7"}
    assert "www-authenticate" in problem_of(Unauthorized("x"))[1]


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret"), MemoryError("secret")])
def test_anything_else_is_opaque(error: Exception) -> None:
    problem, _ = problem_of(error)
    assert problem.status == 500
    assert "secret" not in str(problem)


def test_a_refused_image_is_named_and_all_is_shortened() -> None:
    document, _ = problem_of(ImageRefused(3, "a.png", UndecodableImage("x")))
    assert (document.status, document.index, document.filename) == (422, 3, "a.png")
    document, _ = problem_of(ImageRefused(3, "n" * 5000, UndecodableImage("x" * 20_000)))
    assert len(document.detail) <= MAX_DETAIL + 3 and len(document.filename or "") <= MAX_DETAIL + 3
    document, _ = problem_of(errors.InferenceFailed(3, "why"))
    assert (document.status, document.index) == (500, 3)
