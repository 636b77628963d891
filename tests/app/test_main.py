"""What only the wiring decides."""

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


async def test_a_slash_too_many_is_not_redirected() -> None:
    async with running(root_path="/u") as app:
        assert (await app.client.get("/model/")).status_code == 404
