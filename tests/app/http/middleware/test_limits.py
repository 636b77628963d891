"""Limits on requests at once and on the bytes of their bodies."""

from __future__ import annotations

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


async def test_too_many_requests_at_once() -> None:
    async with running(max_requests=1) as app:
        first = await hold(app)
        response = await app.client.post("/predict", content=png(1), headers=PNG)
        check_problem(response, 429, "too-many-requests")
        assert int(response.headers["retry-after"]) >= 1
        for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"):
            assert (await app.client.get(path)).status_code == 200
        app.model.pipeline.gate.set()
        check_predictions(await first, [5])
        assert await app.metric('psc_rejected_total{reason="too-many-requests"}') == 1


async def test_released_bodies_no_longer_count() -> None:
    async with running(max_buffered_bytes=1000) as app:
        for _ in range(20):
            check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])


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
