"""What the routes share: how the process ends, and metrics before the first request."""

from __future__ import annotations

import pytest

from tests.app.support import running

pytestmark = pytest.mark.anyio


async def test_counters_start_at_zero() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        assert 'psc_abstained_total{model="m",reason="ood"} 0.0' in text
        assert f'psc_predictions_total{{label="{app.model.classes[0]}",model="m"}} 0.0' in text
