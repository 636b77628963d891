"""While the service drains, answers ask clients to connect elsewhere."""

from __future__ import annotations

import pytest

from tests.app.fakes import png
from tests.app.http.support import check_problem
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


async def test_draining_is_told_and_closes_connections_but_still_answers() -> None:
    async with running() as app:
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert "connection" not in answer.headers
        app.service.begin_drain()
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reasons"] == {"service": "draining"}
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        refused = await app.client.post("/predict", content=b"no image", headers=PNG)
        check_problem(refused, 415, "unsupported-image")
        assert refused.headers["connection"] == "close"
