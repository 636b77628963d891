"""Allowed hosts, probes, which name no host, and origins of other sites."""

from __future__ import annotations

import pytest

from tests.app.support import running

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

ASKED = {"access-control-request-method": "POST"}


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


async def test_probes_are_answered_whatever_host_they_name() -> None:
    async with running(allowed_hosts="psc.example") as app:
        for path in PROBES:
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 200
        for path in ("/v2/models/m", "/v2/models/ready", "/v2/models/m/versions/ready"):
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "psc.example"})).status_code == 200


async def test_a_refused_preflight_is_a_problem() -> None:
    async with running(cors_origins=("https://good.example",)) as app:
        good = await app.client.options("/predict", headers={"origin": "https://good.example", **ASKED})
        assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://good.example")
        bad = await app.client.options("/predict", headers={"origin": "https://bad.example", **ASKED})
        assert (bad.status_code, bad.headers["content-type"]) == (400, "application/problem+json")
        document = bad.json()
        assert document["type"] == "urn:psc:problem:cors"
        assert document["detail"] == "Disallowed CORS origin; allow it with the setting cors_origins"
        assert int(bad.headers["content-length"]) == len(bad.content)
