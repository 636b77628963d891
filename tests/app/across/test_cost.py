"""What a request costs, counted: function calls, futures, hops between threads, device steps, copies of its bytes.

Counts do not depend on the machine.  A budget is what was counted plus 15 % at most: whoever breaks it has put new work
on the path of every request, and should know that.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.app.fakes import FakeModel, png
from tests.app.support import Running, running, until

pytestmark = pytest.mark.anyio

CALLS = 370
"""Python functions entered on the event loop for one image, its decoding left out: 354 counted, plus 5 %."""

NOT_COUNTED = (
    "/tests/",
    "/asyncio/",
    "/selectors.py",
    "/anyio/",
    "/inspect.py",
    "/jaxtyping/",
    "/beartype/",
    "<@beartype",
    "<string>",
    "<frozen ",
)
"""The test itself with its type checks, which are generated code, and the event loop: the service runs on another."""


async def post(app: Any, body: bytes) -> int:
    """The status of a raw image posted straight to the ASGI application."""
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"content-type", b"image/png"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return status


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes by the clock, not by the request."""
    monkeypatch.setattr("app.service.SWEEP_SECONDS", 3600.0)


class Decoded:
    """A decoder that has nothing to do."""

    shape = channels, height, width = 1, 8, 8

    def from_bytes(self, data: bytes, *, max_pixels: int) -> Any:
        return np.zeros((1, 8, 8), np.uint8)


async def test_function_calls_of_a_request(no_sweep: None) -> None:
    """Guards against more layers around the handler than the framework's and our middleware."""
    model, body = FakeModel(), png(1)
    model.preprocess = Decoded()  # type: ignore[assignment]
    async with running({"m": model}) as app:
        for _ in range(3):
            await post(app.app, body)
        requests = 20
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                calls[frame.f_code.co_filename.replace("\\", "/") + ":" + frame.f_code.co_name] += 1

        sys.setprofile(count)
        try:
            for _ in range(requests):
                await post(app.app, body)
        finally:
            sys.setprofile(None)
        ours = Counter({name: n for name, n in calls.items() if not any(part in name for part in NOT_COUNTED)})
        each = ours.total() / requests
        assert each <= CALLS, ours.most_common(40)


class CountingLoop:
    """The event loop as the engine uses it; stands in for :mod:`asyncio` there, which hands it out."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.counts: Counter[str] = Counter()

    def get_running_loop(self) -> CountingLoop:
        return self

    def __getattr__(self, name: str) -> Any:
        if hasattr(asyncio, name):
            return getattr(asyncio, name)
        self.counts[name] += 1
        return getattr(self._loop, name)


async def held(app: Running) -> asyncio.Task[int]:
    """A request that keeps the device busy until the gate opens."""
    app.model.pipeline.gate.clear()
    app.model.pipeline.sizes.clear()
    task = asyncio.create_task(post(app.app, png(1)))
    await until(lambda: app.model.pipeline.sizes)
    return task


async def test_futures_and_hops_of_requests_that_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the design: one future a request; wake-ups and hops between threads follow turns and batches."""
    loop = CountingLoop()
    monkeypatch.setattr("app.inference.engine.asyncio", loop)
    async with running(max_batch_size=64) as app:
        first = await held(app)
        loop.counts.clear()
        requests = [asyncio.create_task(post(app.app, png(k))) for k in range(50)]
        await until(lambda: app.pending == 50)
        assert loop.counts == {"create_future": 50, "call_soon": 1}
        app.model.pipeline.gate.set()
        assert await asyncio.gather(first, *requests) == [200] * 51
        assert app.model.pipeline.sizes == [1, 50]
        assert loop.counts["create_future"] == 50
        assert loop.counts["call_soon"] == 1
        assert loop.counts["call_soon_threadsafe"] == 2  # The held request's answer, and the batch's.


async def test_each_batch_is_one_step() -> None:
    """Guards against per-image work behind the queue."""
    async with running(max_batch_size=64) as app:
        first = await held(app)
        requests = [asyncio.create_task(post(app.app, png(k))) for k in range(50)]
        await until(lambda: app.pending == 50)
        app.model.pipeline.gate.set()
        assert await asyncio.gather(first, *requests) == [200] * 51
        assert app.model.pipeline.sizes == [1, 50]


async def test_the_decoder_gets_the_very_bytes_that_the_server_received() -> None:
    """Guards against a copy of every image on its way."""
    seen: list[bytes] = []
    model = FakeModel()
    real = model.preprocess

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def from_bytes(self, data: bytes, *, max_pixels: int) -> Any:
            seen.append(data)
            return real.from_bytes(data, max_pixels=max_pixels)

    model.preprocess = Recording()  # type: ignore[assignment]
    async with running({"m": model}) as app:
        body = png(7)
        assert await post(app.app, body) == 200
        assert seen[0] is body


async def test_a_request_looks_up_one_metric(no_sweep: None) -> None:
    """Guards against label look-ups and locks for each prediction: they are recorded in bulk."""
    async with running() as app:
        await app.metric("psc_ready")
        looked_up = []

        class Noting(dict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                looked_up.append(name)
                return super().__getitem__(name)

        app.service.metrics.made = Noting(app.service.metrics.made)
        assert await post(app.app, png(1)) == 200
        assert looked_up == ["psc_request_seconds"]
        assert await app.metric('psc_request_seconds_count{route="/predict",status="200"}') == 1
        assert await app.metric('psc_ood_p_value_count{model="m"}') == 1
