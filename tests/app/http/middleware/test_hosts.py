"""Allowed hosts, and origins of other sites."""

from __future__ import annotations

import pytest

from tests.app.support import running

pytestmark = pytest.mark.anyio


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


async def test_a_host_with_www_is_another_host() -> None:
    async with running(allowed_hosts="www.psc.example") as app:
        assert (await app.client.get("/model", headers={"host": "psc.example"})).status_code == 400
