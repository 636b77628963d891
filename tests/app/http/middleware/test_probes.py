"""Probes, which name no host."""

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


async def test_probes_are_answered_whatever_host_they_name() -> None:
    async with running(allowed_hosts="psc.example") as app:
        for path in PROBES:
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 200
        for path in ("/v2/models/m", "/v2/models/ready", "/v2/models/m/versions/ready"):
            assert (await app.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "10.0.0.7:8000"})).status_code == 400
        assert (await app.client.get("/model", headers={"host": "psc.example"})).status_code == 200
