"""The rest of the surface: model document, OpenAPI, draining, logs, hosts, CORS, traces."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from app.http.problems import responses
from app.http.schemas import ModelDocument
from app.observability.logs import JsonFormatter
from app.observability.tracing import begin_trace, current_trace
from tests.app.fakes import FakeModel, png
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio

PROBES = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/m/ready",
    "/v2/models/m/versions/v1/ready",
)


async def test_the_model_document() -> None:
    async with running({"m": FakeModel(), "n": FakeModel("v9")}) as app:
        document = ModelDocument.model_validate_json((await app.client.get("/model")).content)
        assert (document.name, document.version, document.models) == ("m", "v1", ["m", "n"])
        assert sum(document.calibration.ood_score.counts) == document.calibration.images == 99
        assert len(document.calibration.ood_score.edges) == len(document.calibration.ood_score.counts) + 1
        assert document.report == {"metrics": {"accuracy": 0.99}}
        assert (await app.client.get("/models/n")).json()["version"] == "v9"
        assert (await app.client.get("/models/x")).status_code == 404


async def test_openapi_declares_the_three_bodies_and_every_problem() -> None:
    async with running() as app:
        document = (await app.client.get("/openapi.json")).json()
        for path in ("/predict", "/models/{name}/predict"):
            operation = document["paths"][path]["post"]
            assert set(operation["requestBody"]["content"]) == {"multipart/form-data", "application/json", "image/*"}
            assert set(operation["responses"]) >= {"200", "400", "401", "413", "415", "422", "429", "503", "504"}
            assert {each["name"] for each in operation["parameters"]} >= {"top_k", "explain", "alpha"}
        _check_references(document, document)
        assert "HTTPValidationError" not in json.dumps(document["paths"])
        assert (await app.client.get("/docs")).status_code == 200


def _check_references(node: Any, document: dict[str, Any]) -> None:
    if isinstance(node, dict):
        if "$ref" in node:
            assert node["$ref"].rsplit("/", 1)[1] in document["components"]["schemas"], node
        for value in node.values():
            _check_references(value, document)
    elif isinstance(node, list):
        for value in node:
            _check_references(value, document)


def test_every_problem_status_has_a_description() -> None:
    for status in (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504):
        assert responses(status)[status]["description"]


async def test_draining_is_told_and_closes_connections_but_still_answers() -> None:
    async with running() as app:
        app.service.begin_drain()
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reasons"] == {"service": "draining"}
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"


async def test_a_host_with_www_is_another_host() -> None:
    async with running(allowed_hosts="www.psc.example") as app:
        assert (await app.client.get("/model", headers={"host": "psc.example"})).status_code == 400


async def test_a_slash_too_many_is_not_redirected() -> None:
    async with running(root_path="/u") as app:
        assert (await app.client.get("/model/")).status_code == 404


async def test_hosts_and_origins() -> None:
    async with running(allowed_hosts="test", cors_origins="https://page.example") as app:
        assert (await app.client.get("/model")).status_code == 200
        assert (await app.client.get("/model", headers={"host": "evil"})).status_code == 400
        response = await app.client.get("/healthz", headers={"origin": "https://page.example"})
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "Inference-Header-Content-Length" in response.headers["access-control-expose-headers"]
        response = await app.client.post("/predict", content=b"?", headers={"origin": "https://page.example"})
        assert response.status_code == 415
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        response = await app.client.get("/healthz", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_the_trace_id_is_continued_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(access_log=True) as app:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        response = await app.client.get("/healthz", headers=headers)
        assert response.headers["traceresponse"].split("-")[1] == trace_id
        record = next(record for record in caplog.records if record.message == "request")
        assert vars(record)["path"] == "/healthz"
        assert vars(record)["status"] == 200


async def test_unknown_paths_and_methods_are_problems_under_one_metric() -> None:
    async with running() as app:
        for method, path, status in (("GET", "/x", 404), ("GET", "/predict", 405), ("GET", "/" + "y" * 50, 404)):
            response = await app.client.request(method, path)
            assert response.status_code == status
            assert response.headers["content-type"] == "application/problem+json"
        assert await app.metric('psc_request_seconds_count{route="unmatched",status="404"}') == 2


def test_log_lines_are_json_with_the_trace_id() -> None:
    record = logging.LogRecord("psc.x", logging.INFO, "f", 1, "hello %s", ("you",), None)
    record.model = "m"
    token = current_trace.set(begin_trace("00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    try:
        line = json.loads(JsonFormatter().format(record))
    finally:
        current_trace.reset(token)
    assert line["message"] == "hello you"
    assert line["level"] == "info"
    assert line["model"] == "m"
    assert line["trace_id"] == "a" * 32
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("psc.x", logging.ERROR, "f", 1, "bad", (), (ValueError, error, None))
    assert "ValueError: x" in json.loads(JsonFormatter().format(record))["exception"]


async def test_probes_are_answered_whatever_host_they_name() -> None:
    async with running(allowed_hosts="psc.example") as app:
        for path in PROBES:
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 200
        for path in ("/v2/models/m", "/v2/models/ready", "/v2/models/m/versions/ready"):
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "psc.example"})).status_code == 200


async def test_counters_start_at_zero() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        assert 'psc_abstained_total{model="m",reason="ood"} 0.0' in text
        assert f'psc_predictions_total{{label="{app.model.classes[0]}",model="m"}} 0.0' in text
