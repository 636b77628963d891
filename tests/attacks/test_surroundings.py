"""A wall clock that jumps, and keys that must not be written down."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.app.fakes import png
from tests.app.support import PNG, running, until
from tests.served import GUARD_SECONDS, serve_fake

YEAR = 365 * 24 * 3600.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.usefixtures("device_thread")
@pytest.mark.anyio
@pytest.mark.parametrize("jump", [YEAR, -YEAR])
async def test_a_wall_clock_that_jumps_ends_no_request(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(deadline_seconds=1000) as app:
        app.model.pipeline.check.clear()
        steps = len(app.model.pipeline.sizes)
        waiting = asyncio.create_task(app.client.post("/predict", content=png(1), headers=PNG))
        await until(lambda: len(app.model.pipeline.sizes) > steps)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        app.service.registry.sweep()
        queued = asyncio.create_task(app.client.post("/predict", content=png(2), headers=PNG))
        await until(lambda: app.pending)
        app.service.registry.sweep()
        app.model.pipeline.check.set()
        assert [(await each).status_code for each in (waiting, queued)] == [200, 200]


def test_no_key_is_in_the_log_or_the_metrics() -> None:
    keys = {
        name: f"secret-{name}-0123456789abcdef" for name in ("predict", "admin", "wrong", "bearer", "query", "cookie")
    }
    flags = (f"--api-keys={keys['predict']}", f"--admin-keys={keys['admin']}", "--log-level=debug", "--access-log")
    sent = [{"x-api-key": keys[name]} for name in ("predict", "admin", "wrong")]
    sent += [{"authorization": f"Bearer {keys['bearer']}"}, {"cookie": keys["cookie"]}]
    with serve_fake(*flags) as server, httpx.Client(base_url=server.url, timeout=GUARD_SECONDS) as client:
        for headers in sent:
            client.post(f"/predict?api_key={keys['query']}", content=png(1), headers={**PNG, **headers})
            client.post("/admin/reload", headers=headers)
        metrics = server.metrics()
        assert server.terminate() == 0
    written = "".join(server.log) + metrics
    assert '"path":"/predict"' in written
    assert [name for name, key in keys.items() if key in written] == []
