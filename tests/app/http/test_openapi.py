"""The OpenAPI document names every body, problem and parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import responses
from tests.app.support import running

pytestmark = pytest.mark.anyio


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


HEAD = (
    *(
        "/healthz",
        "/readyz",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/m/ready",
        "/v2/models/m/versions/v1/ready",
    ),
    *("/metrics", "/model", "/models/m", "/", "/docs", "/openapi.json"),
)


async def test_head_is_answered_as_get_and_is_in_no_document() -> None:
    async with running() as app:
        for path in HEAD:
            got, head = await app.client.get(path), await app.client.head(path)
            assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"]), path
        document = (await app.client.get("/openapi.json")).json()
        assert (await app.client.head("/v2/models/n/ready")).status_code == 404
    assert not any("head" in path for path in document["paths"].values())
    assert all("get" in path for name, path in document["paths"].items() if name in HEAD)


async def test_routes_with_a_body_may_answer_that_there_are_too_many_requests(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app:
        document = (await app.client.get("/openapi.json")).json()
    with_body = [path["post"] for path in document["paths"].values() if "requestBody" in path.get("post", {})]
    assert len(with_body) >= 5
    assert all("429" in operation["responses"] for operation in with_body)


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
        assert len(responses(status)[status]["description"]) > 5
    assert responses(413)[413]["description"] == "Body too large. Image too large. Too many images. Too many pixels."
