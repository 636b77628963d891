"""``/healthz`` and ``/readyz``."""

from __future__ import annotations

import pytest

from tests.app.fakes import FakeModel, png
from tests.app.http.support import check_predictions, check_problem
from tests.app.support import PNG, running, until

pytestmark = pytest.mark.anyio


async def test_not_ready_is_503_until_warm() -> None:
    model = FakeModel()
    model.pipeline.gate.clear()
    async with running({"m": model}, ready=False) as app:
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"status": "not ready", "reasons": {"m": "loading"}}
        check_problem(await app.client.post("/predict", content=png(1), headers=PNG), 503, "not-ready")
        assert (await app.client.get("/healthz")).json() == {"status": "ok"}
        model.pipeline.gate.set()
        await until(lambda: not app.service.reasons())
        assert (await app.client.get("/readyz")).status_code == 200
        check_predictions(await app.client.post("/predict", content=png(1), headers=PNG), [1])
