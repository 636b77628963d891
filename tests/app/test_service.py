"""What the routes share: how the process ends, and metrics before the first request."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from app.main import make_service
from app.service import Host
from app.settings import load_settings
from tests.app.fakes import FakeModel
from tests.app.support import clock, running, serve_next, until

pytestmark = pytest.mark.anyio


async def test_counters_start_at_zero() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        assert 'psc_abstained_total{model="m",reason="ood"} 0.0' in text
        assert f'psc_predictions_total{{label="{app.model.classes[0]}",model="m"}} 0.0' in text


def test_a_service_that_was_not_started_has_written_nothing(tmp_path: Path) -> None:
    service = make_service(load_settings({"log": str(tmp_path / "log")}), {}, Host())
    assert service.log is not None and not list(tmp_path.rglob("*.parquet"))


async def test_host_is_told_when_models_are_ready_and_when_replaced_ones_have_ended() -> None:
    class Told(Host):
        times = 0

        def models_changed(self) -> None:
            self.times += 1

    host = Told()
    async with running(host=host, admin_keys="root") as app:
        await until(lambda: host.times == 1)
        serve_next(app, FakeModel("v2"))
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200
        await until(lambda: host.times == 2)


async def test_log_has_time_when_the_models_have_used_all_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(log=str(tmp_path), drain_seconds=1000) as app:
        with clock() as advance:
            left: list[float] = []

            async def close(_: object, *, within_s: float) -> None:
                left.append(within_s)
                advance(within_s)

            monkeypatch.setattr("app.models.Registry.close", close)
            monkeypatch.setattr("app.log.LogWriter.close", close)
            await app.service.close()
        monkeypatch.undo()
    assert left == [pytest.approx(800, abs=100), pytest.approx(200, abs=100)]


@pytest.mark.parametrize(("log", "is_told"), [(False, False), (True, True)])
async def test_deadline_beyond_the_drain_is_told_at_the_start(
    log: bool, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(log=str(tmp_path) if log else None, deadline_seconds=9, drain_seconds=10):
        pass
    told = "requests may take 9 s, but have only 8 s when the service is told to end; raise PSC_DRAIN_SECONDS"
    assert (told in caplog.text) == is_told


async def test_threads_are_a_service_s_own_and_end_with_it(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app, running(log=str(tmp_path)) as other:
        pools = [app.service.parser, app.service.searcher, other.service.parser, other.service.searcher]
        threads = {await asyncio.wrap_future(pool.submit(threading.current_thread)) for pool in pools}
        assert len(threads) == 4
    await until(lambda: not any(thread.is_alive() for thread in threads))
