"""Limits on requests at once and on the bytes of their bodies."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from tests.app.fakes import png
from tests.app.http.support import check_predictions, check_problem, hold
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


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


async def test_bodies_of_all_requests_together() -> None:
    async with running(max_buffered_bytes=1000) as app:
        response = await app.client.post("/predict", content=b"x" * 1001, headers=PNG)
        check_problem(response, 429, "too-many-requests")
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


async def test_released_bodies_no_longer_count() -> None:
    async with running(max_buffered_bytes=1000) as app:
        for _ in range(20):
            check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])


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


@pytest.mark.parametrize("coding", ["identity", "Identity", "", "identity, identity"])
async def test_a_body_that_says_it_is_not_compressed_is_read(coding: str) -> None:
    async with running() as app:
        response = await app.client.post("/predict", content=png(3), headers={**PNG, "content-encoding": coding})
        check_predictions(response, [3])


async def test_each_line_of_content_encoding_counts() -> None:
    async with running() as app:
        lines = [*PNG.items(), ("content-encoding", "identity"), ("content-encoding", "br")]
        check_problem(await app.client.post("/predict", content=b"", headers=lines), 415, "unsupported-encoding")


@pytest.mark.parametrize("length", ["x", "-1", ""])
async def test_announced_length_that_is_no_number(length: str) -> None:
    async with running(max_body_bytes=1000) as app:
        headers = {**PNG, "content-length": length}
        check_predictions(await app.client.post("/predict", content=png(3), headers=headers), [3])


async def test_announced_length_of_thousands_of_digits() -> None:
    """Python refuses to read more than 4,300, and servers let them through."""
    async with running(max_body_bytes=1000) as app:
        for length, status in (("0" * 5000 + "1001", 413), ("9" * 20, 413), ("9" * 5000, 413), ("0" * 5000, 200)):
            response = await app.client.post("/predict", content=png(3), headers={**PNG, "content-length": length})
            assert response.status_code == status


async def test_a_large_body_without_room_is_not_read() -> None:
    async with running(max_buffered_bytes=1 << 20) as app:

        async def chunks() -> Any:
            raise AssertionError("read")
            yield b""

        headers = {**PNG, "content-length": str(2 << 20)}
        check_problem(await app.client.post("/predict", content=chunks(), headers=headers), 429, "too-many-requests")
        check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])
