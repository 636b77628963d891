"""What the routes share: how the process ends, and metrics before the first request."""

from __future__ import annotations

import pytest

from tests.app.fakes import png
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


async def test_draining_is_told_and_closes_connections_but_still_answers() -> None:
    async with running() as app:
        app.service.begin_drain()
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reasons"] == {"service": "draining"}
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"


async def test_counters_start_at_zero() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        assert 'psc_abstained_total{model="m",reason="ood"} 0.0' in text
        assert f'psc_predictions_total{{label="{app.model.classes[0]}",model="m"}} 0.0' in text
