"""The model repository: index, load and unload, for one model while another answers."""

from __future__ import annotations

import pytest

from tests.app.fakes import FakeModel, png
from tests.app.http.support import check_predictions
from tests.app.support import PNG, Running, running

pytestmark = pytest.mark.anyio

ADMIN = {"x-api-key": "root"}


async def states(app: Running) -> dict[str, tuple[str, str, str]]:
    response = await app.client.post("/v2/repository/index", headers=ADMIN)
    return {row["name"]: (row["version"], row["state"], row["reason"]) for row in response.json()}


async def test_unload_and_load() -> None:
    async with running({"m": FakeModel(), "n": FakeModel("v2")}, admin_keys="root") as app:
        assert await states(app) == {"m": ("v1", "READY", ""), "n": ("v2", "READY", "")}
        assert (await app.client.post("/v2/repository/models/n/unload", headers=ADMIN)).json() == {}
        assert await states(app) == {"m": ("v1", "READY", ""), "n": ("", "UNAVAILABLE", "unloaded")}
        assert (await app.client.post("/models/n/predict", content=png(1), headers=PNG)).status_code == 503
        for path in ("/v2/models/n/ready", "/v2/models/n/versions/v2/ready"):
            ready = await app.client.get(path)
            assert (ready.status_code, ready.json()) == (503, {"name": "n", "ready": False})
        assert (await app.client.get("/readyz")).status_code == 200
        check_predictions(await app.client.post("/models/m/predict", content=png(1), headers=PNG), [1])

        again = await app.client.post("/v2/repository/models/n/unload", headers=ADMIN)
        assert (again.status_code, again.json()) == (503, {"error": "model 'n' was unloaded; load it"})
        everything = await app.client.post("/admin/reload", headers=ADMIN)
        assert [row["name"] for row in everything.json()["reloaded"]] == ["m"]

        assert (await app.client.post("/v2/repository/models/n/load", headers=ADMIN)).json() == {}
        assert (await states(app))["n"] == ("v2", "READY", "")
        check_predictions(await app.client.post("/models/n/predict", content=png(2), headers=PNG), [2])
        assert (
            await app.client.post("/v2/repository/models/n/load", headers=ADMIN)
        ).json() == {}  # Again, as a reload.


async def test_refusals() -> None:
    async with running(api_keys="alice", admin_keys="root", workers=2) as app:
        for what in ("load", "unload"):
            for headers, status in (({}, 401), ({"x-api-key": "alice"}, 401)):
                response = await app.client.post(f"/v2/repository/models/m/{what}", headers=headers)
                assert response.status_code == status
        assert (await app.client.post("/v2/repository/index")).status_code == 401
        assert (await app.client.post("/v2/repository/models/x/load", headers=ADMIN)).status_code == 404
        assert (await app.client.post("/v2/repository/models/m/unload", headers=ADMIN)).status_code == 400
