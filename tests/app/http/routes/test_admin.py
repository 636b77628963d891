"""``/admin`` and who may ask."""

from __future__ import annotations

import pytest

from tests.app.fakes import png
from tests.app.http.support import check_predictions, check_problem
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


async def test_keys_guard_predictions_and_administration() -> None:
    async with running(api_keys="alice,bob", admin_keys="root") as app:
        check_problem(await app.client.post("/predict", content=png(1), headers=PNG), 401, "unauthorized")
        response = await app.client.post("/predict", content=png(1), headers={**PNG, "x-api-key": "mallory"})
        assert check_problem(response, 401, "unauthorized")
        assert response.headers["www-authenticate"].startswith("Bearer")
        for key in ("alice", "bob", "root"):
            headers = {**PNG, "authorization": f"Bearer {key}"}
            check_predictions(await app.client.post("/predict", content=png(1), headers=headers), [1])
        check_problem(await app.client.get("/model"), 401, "unauthorized")
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "alice"})).status_code in (401, 403)
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200
