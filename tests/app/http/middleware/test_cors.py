"""Preflight requests."""

from __future__ import annotations

import pytest

from tests.app.support import running

pytestmark = pytest.mark.anyio

ASKED = {"access-control-request-method": "POST"}


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
