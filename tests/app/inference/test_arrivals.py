"""Requests of one turn of the event loop, on an engine whose step is quick."""

from __future__ import annotations

import asyncio

import pytest

from tests.app.fakes import pixels
from tests.app.inference.support import engine

pytestmark = pytest.mark.anyio


async def test_quick_step_waits_until_no_more_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 60.0)
    async with engine(max_batch=8) as setup:

        async def later(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await setup.arrays(pixels(turns))

        await asyncio.gather(*(later(turns) for turns in (0, 0, 1, 2, 20)))
        assert setup.network.sizes == [4, 1]
        setup.network.sizes.clear()
        await asyncio.gather(*(later(turns) for turns in range(20)))
        assert setup.network.sizes == [8, 8, 4]
