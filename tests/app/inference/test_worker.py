"""The device worker: where batches run, in which order, and what a dead device ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import (
    NotReady,
)
from app.inference.batcher import Batcher, RequestMode, Result
from app.inference.engine import Engine, Phase
from app.inference.steps import EagerStep
from psc_core.errors import DeviceError
from tests.app.fakes import FakePipeline, outputs_of, pixels
from tests.app.inference.support import Metrics, Setup, decoder_on, engine, stack
from tests.app.support import until

pytestmark = pytest.mark.anyio


async def where_steps_run(setup: Setup) -> set[int]:
    """Threads of the next few steps."""
    setup.network.callers.clear()
    for _ in range(3):
        await setup.arrays(pixels(10))
    return set(setup.network.callers)


@pytest.mark.usefixtures("device_thread")
async def test_quick_step_runs_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as setup:
        assert threading.get_ident() not in await where_steps_run(setup)
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 60.0)
    async with engine() as setup:
        assert await where_steps_run(setup) == {threading.get_ident()}
    async with engine(delay_ms=1.0) as setup:  # Waiting for a fuller batch is the thread's.
        assert threading.get_ident() not in await where_steps_run(setup)


async def test_device_that_dies_on_the_event_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 60.0)
    async with engine() as setup:
        setup.network.dead = True
        requests = [setup.arrays(pixels(k), pixels(k)) for k in range(20)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, (DeviceError, NotReady)) for error in errors)
        await until(lambda: setup.engine.device_error is not None)
        assert setup.engine.phase is Phase.FAILED
        with pytest.raises(NotReady):
            await setup.arrays(pixels(1))


@pytest.mark.usefixtures("device_thread")
async def test_dead_device_fails_everything_and_is_reported() -> None:
    async with engine() as setup:
        setup.network.check.clear()
        requests = [asyncio.create_task(setup.arrays(pixels(k), pixels(k))) for k in range(20)]
        await until(lambda: setup.network.sizes)
        setup.network.dead = True
        setup.network.check.set()
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, DeviceError) for error in errors)
        await until(lambda: setup.engine.device_error is not None)
        assert setup.engine.phase is Phase.FAILED
        with pytest.raises(NotReady):
            await setup.arrays(pixels(1))


@pytest.mark.usefixtures("anywhere")
async def test_device_dead_at_warm_up() -> None:
    async with engine(start=False) as setup:
        setup.network.dead = True
        with pytest.raises(DeviceError, match="warm-up"):
            await setup.engine.start()
        assert setup.engine.phase is Phase.FAILED
        assert setup.engine.device_error is None


class SlowStep(EagerStep):
    """Two slots, like a GPU: a launch returns at once and is done when its event is set."""

    slots = 2

    def __init__(self, network: FakePipeline, *, max_batch: int) -> None:
        super().__init__(network, (1, 8, 8), max_batch=max_batch, device=torch.device("cpu"))
        self.network = network
        self.buffers = [np.zeros((max_batch, 1, 8, 8), np.uint8) for _ in range(2)]
        self.launched: list[int] = []
        self.finish = True
        self.polls = 0
        self.explaining, self.may_explain = threading.Event(), threading.Event()

    def input(self, slot: int) -> Any:
        return self.buffers[slot]

    def warm_up(self, is_wanted: object = None) -> None:
        pass

    def launch(self, slot: int, count: int) -> None:
        self.launched.append(count)

    def done(self, slot: int) -> bool:
        self.polls += 1
        return self.finish

    def fetch(self, slot: int, count: int) -> Any:
        return self.network(torch.from_numpy(self.buffers[slot][:count])).numpy()

    def explain(self, images: Any, mode: str) -> Result:
        self.explaining.set()
        self.may_explain.wait()
        return super().explain(images, mode)


@asynccontextmanager
async def slow_engine() -> AsyncIterator[tuple[Engine, SlowStep]]:
    step = SlowStep(FakePipeline(), max_batch=4)
    with ThreadPoolExecutor(1) as pool:
        decoder = decoder_on(pool, threads=1, inline_bytes=0)
        made = Engine(
            "m",
            step,
            decoder,
            batcher=Batcher(max_batch=4, max_queue_images=100),
            recorder=Metrics(),
            deadline_s=10,
        )
        await made.start()
        step.launched.clear()
        yield made, step
        await made.close(within_s=5)


async def test_an_explanation_does_not_hold_a_finished_batch() -> None:
    async with slow_engine() as (made, step):
        step.finish = False
        first = asyncio.create_task(made.predict(stack(pixels(1))))
        await until(lambda: step.launched == [1])
        explained = asyncio.create_task(made.predict(stack(pixels(2)), mode=RequestMode.EXPLAIN))
        await until(lambda: made.pending == 1)
        step.finish = True
        await first
        await until(step.explaining.is_set)
        assert not explained.done()
        step.may_explain.set()
        await explained


async def test_only_a_full_batch_is_launched_behind_the_running_one() -> None:
    async with slow_engine() as (made, step):
        step.finish = False
        first = asyncio.create_task(made.predict(stack(pixels(1))))
        await until(lambda: step.launched == [1])
        small = asyncio.create_task(made.predict(stack(pixels(2))))
        await until(lambda: made.pending == 1)
        polls = step.polls
        await until(lambda: step.polls > polls + 2)  # The worker has looked for a batch in between.
        assert step.launched == [1]
        large = asyncio.create_task(made.predict(stack(*[pixels(3)] * 5)))
        await until(lambda: len(step.launched) >= 2)
        assert step.launched[1] == 4
        step.finish = True
        answers = await asyncio.gather(first, small, large)
        for answer, value in zip(answers, (1, 2, 3), strict=True):
            expected = outputs_of(torch.from_numpy(stack(*[pixels(value)] * len(answer.packed)))).numpy()
            np.testing.assert_allclose(answer.packed, expected, atol=1e-6)
