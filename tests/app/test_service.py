"""What the routes share: how the process ends, and metrics before the first request."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from app.auth import ApiKeys
from app.service import Host, Service
from app.settings import load_settings
from psc_core.log.store import open_log
from tests.app.support import running, until

pytestmark = pytest.mark.anyio


async def test_counters_start_at_zero() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        assert 'psc_abstained_total{model="m",reason="ood"} 0.0' in text
        assert f'psc_predictions_total{{label="{app.model.classes[0]}",model="m"}} 0.0' in text


def test_a_service_that_was_not_started_has_written_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    unused: Any = None
    service = Service(load_settings({"log": log.where}), ApiKeys(), (), unused, log, Host())
    assert service.log is not None and not (tmp_path / "log").exists()


async def test_threads_are_a_service_s_own_and_end_with_it(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app, running(log=str(tmp_path)) as other:
        pools = [app.service.parser, app.service.searcher, other.service.parser, other.service.searcher]
        threads = {await asyncio.wrap_future(pool.submit(threading.current_thread)) for pool in pools}
        assert len(threads) == 4
    await until(lambda: not any(thread.is_alive() for thread in threads))
