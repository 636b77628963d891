"""The engine: right outputs for every image, and only the requests at fault fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import (
    ClientGone,
    DeadlineExceeded,
    ImageRefused,
    InferenceFailed,
    NotReady,
    QueueFull,
)
from app.inference.decoder import Decoder, EncodedImage
from app.inference.engine import Engine, Phase
from app.inference.queue import Batcher
from app.inference.steps import EagerStep, make_step
from app.inference.steps.base import buckets_to
from psc_core.errors import DeviceError
from tests.app.fakes import NOT_FINITE, POISON, PREPROCESS, FakePipeline, outputs_of, pixels, png
from tests.app.support import until

pytestmark = pytest.mark.anyio


class Metrics:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def batch(self, size: int, seconds: float, waits: Any) -> None:
        self.batches.append(size)

    def decoded(self, seconds: float) -> None:
        pass


class Setup:
    def __init__(self, engine: Engine, network: FakePipeline, metrics: Metrics) -> None:
        self.engine, self.network, self.metrics = engine, network, metrics
        self.failures: list[Exception] = []

    async def arrays(self, *images: Any, deadline_s: float = 10.0, **options: Any) -> Any:
        return (await self.engine.predict(stack(*images), deadline_s=deadline_s, **options)).packed


def stack(*images: Any) -> Any:
    return np.stack([image[None] for image in images])


@asynccontextmanager
async def engine(
    *, max_batch: int = 8, queue: int = 1000, inline: int = 1 << 20, start: bool = True, delay_ms: float = 0.0
) -> AsyncIterator[Setup]:
    network, metrics = FakePipeline(), Metrics()
    with ThreadPoolExecutor(2) as pool:
        decoder = Decoder(pool, threads=2, preprocess=PREPROCESS, max_pixels=10_000, inline_bytes=inline)
        step = make_step(network, decoder.shape, max_batch=max_batch, device=torch.device("cpu"), compiled=False)
        failures: list[Exception] = []
        made = Engine(
            "m",
            step,
            decoder,
            batcher=Batcher(max_batch_size=max_batch, max_queue_images=queue, max_delay_s=delay_ms / 1000),
            observer=metrics,
            on_failure=failures.append,
        )
        setup = Setup(made, network, metrics)
        setup.failures = failures
        if start:
            await made.start()
            network.sizes.clear()
        yield setup
        network.gate.set()
        await made.close(within_s=5)


@pytest.fixture(params=["on its thread", "on the event loop"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test holds wherever steps run."""
    monkeypatch.setattr("app.inference.steps.eager.QUICK_SECONDS", 0.0 if request.param == "on its thread" else 60.0)


async def where_steps_run(setup: Setup) -> set[int]:
    """Threads of the next few steps."""
    setup.network.callers.clear()
    for _ in range(3):
        await setup.arrays(pixels(10))
    return set(setup.network.callers)


async def test_quick_step_runs_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as setup:
        assert threading.get_ident() not in await where_steps_run(setup)
    monkeypatch.setattr("app.inference.steps.eager.QUICK_SECONDS", 60.0)
    async with engine() as setup:
        assert await where_steps_run(setup) == {threading.get_ident()}
    async with engine(delay_ms=1.0) as setup:  # Waiting for a fuller batch is the thread's.
        assert threading.get_ident() not in await where_steps_run(setup)


async def test_quick_step_waits_until_no_more_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.eager.QUICK_SECONDS", 60.0)
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


class CountsThreads(FakePipeline):
    """Notes how many threads PyTorch would use in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return super().__call__(images)


async def test_a_quick_step_takes_one_thread_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.get_num_threads()
    for quick, given, expected in ((0.0, None, usual), (60.0, None, 1), (60.0, 2, 2), (0.0, 2, 2)):
        monkeypatch.setattr("app.inference.steps.eager.QUICK_SECONDS", quick)
        network = CountsThreads()
        step = make_step(network, (1, 8, 8), max_batch=2, device=torch.device("cpu"), compiled=False, threads=given)
        try:
            step.warm_up()
            step.fetch(0, 1)
        finally:
            torch.set_num_threads(usual)
        assert network.threads[-1] == expected
        assert step.quick is (quick > 0)


@pytest.mark.usefixtures("anywhere")
async def test_every_image_gets_its_own_outputs() -> None:
    async with engine() as setup:
        counts = [1, 3, 20, 1, 7, 1, 40, 2]
        requests = [[pixels((13 * i + 7 * k) % 200) for k in range(n)] for i, n in enumerate(counts)]
        answers = await asyncio.gather(*(setup.arrays(*images) for images in requests))
        for images, packed in zip(requests, answers, strict=True):
            expected = outputs_of(torch.from_numpy(stack(*images))).numpy()
            np.testing.assert_allclose(packed, expected, atol=1e-6)
        assert sum(setup.metrics.batches) == sum(counts)
        assert max(setup.metrics.batches) == 8


@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_decoding_at_once_and_on_threads_agree(inline: int) -> None:
    async with engine(inline=inline) as setup:
        uploads = [EncodedImage(png(10 * k)) for k in range(12)]
        packed = (await setup.engine.predict(uploads, deadline_s=10)).packed
        expected = outputs_of(torch.from_numpy(stack(*(pixels(10 * k) for k in range(12))))).numpy()
        np.testing.assert_allclose(packed, expected, atol=1e-6)


@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_the_first_bad_image_is_named(inline: int) -> None:
    async with engine(inline=inline) as setup:
        uploads = [
            EncodedImage(png(1)),
            EncodedImage(b"nonsense", "a.txt"),
            EncodedImage(png(2)),
            EncodedImage(b"", "b.txt"),
        ]
        with pytest.raises(ImageRefused) as caught:
            await setup.engine.predict(uploads, deadline_s=10)
        assert (caught.value.index, caught.value.name) == (1, "a.txt")
        assert setup.engine.pending == 0
        assert setup.network.sizes == []


async def test_small_files_of_many_pixels_are_decoded_on_threads() -> None:
    async with engine() as setup:
        decoder = setup.engine._decoder
        assert decoder.decode_now([EncodedImage(png(0, size=90))]) is not None
        assert decoder.decode_now([EncodedImage(png(0, size=90))] * 3) is None
        with pytest.raises(ImageRefused, match="at most 10000 pixels"):
            await setup.engine.predict([EncodedImage(png(0, size=200))], deadline_s=10)


async def test_waiting_requests_run_as_one_batch() -> None:
    async with engine() as setup:
        setup.network.gate.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.engine.pending == 0 and not setup.engine._arrivals and first)
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(setup.arrays(pixels(k))) for k in range(6)]
        await until(lambda: setup.engine.pending == 6)
        setup.network.gate.set()
        await asyncio.gather(first, *others)
        assert setup.network.sizes == [1, 6]


@pytest.mark.usefixtures("anywhere")
async def test_out_of_memory_splits_the_batch_and_goes_on() -> None:
    async with engine() as setup:
        setup.network.memory = 3
        packed = await setup.arrays(*(pixels(k) for k in range(8)))
        expected = outputs_of(torch.from_numpy(stack(*(pixels(k) for k in range(8))))).numpy()
        np.testing.assert_allclose(packed, expected, atol=1e-6)
        assert max(size for size in setup.network.sizes[1:] if size <= 3) == 2
        assert setup.engine.phase is Phase.READY


@pytest.mark.usefixtures("anywhere")
async def test_memory_is_given_back_before_the_halves_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    async with engine() as setup:
        setup.network.memory = 2
        monkeypatch.setattr(EagerStep, "release_memory", lambda self: seen.append(list(setup.network.sizes)))
        await setup.arrays(*(pixels(k) for k in range(4)))
        assert seen == [[4]]
        assert setup.network.sizes == [4, 2, 2]


@pytest.mark.usefixtures("anywhere")
async def test_no_memory_even_for_one_image_fails_that_request_only() -> None:
    async with engine() as setup:
        setup.network.memory = 0
        with pytest.raises(DeviceError, match="memory for one image"):
            await setup.arrays(pixels(1))
        setup.network.memory = 8
        assert len(await setup.arrays(pixels(1))) == 1


@pytest.mark.usefixtures("anywhere")
async def test_failing_image_fails_only_its_request() -> None:
    async with engine(delay_ms=50) as setup:
        good = [setup.arrays(pixels(k)) for k in range(5)]
        bad = setup.arrays(pixels(9), pixels(9, first=POISON))
        *packed, error = await asyncio.gather(*good, bad, return_exceptions=True)
        assert isinstance(error, InferenceFailed)
        assert "image 1" in str(error)
        for k, outputs in enumerate(packed):
            expected = outputs_of(torch.from_numpy(stack(pixels(k)))).numpy()
            np.testing.assert_allclose(outputs, expected, atol=1e-6)
        assert setup.engine.phase is Phase.READY
        assert not setup.failures


@pytest.mark.usefixtures("anywhere")
async def test_outputs_that_are_not_finite() -> None:
    async with engine(delay_ms=50) as setup:
        good, bad = setup.arrays(pixels(1)), setup.arrays(pixels(2), pixels(3, first=NOT_FINITE))
        packed, error = await asyncio.gather(good, bad, return_exceptions=True)
        assert np.isfinite(packed).all()
        assert isinstance(error, InferenceFailed)
        assert "image 1" in str(error)


async def test_device_that_dies_on_the_event_loop_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.eager.QUICK_SECONDS", 60.0)
    async with engine() as setup:
        setup.network.dead = True
        requests = [setup.arrays(pixels(k), pixels(k)) for k in range(20)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, (DeviceError, NotReady)) for error in errors)
        await until(lambda: len(setup.failures) == 1)
        assert setup.engine.phase is Phase.FAILED
        with pytest.raises(NotReady):
            await setup.arrays(pixels(1))
    assert len(setup.failures) == 1


async def test_dead_device_fails_everything_and_is_reported_once() -> None:
    async with engine() as setup:
        setup.network.gate.clear()
        requests = [asyncio.create_task(setup.arrays(pixels(k), pixels(k))) for k in range(20)]
        await asyncio.sleep(0.05)
        setup.network.dead = True
        setup.network.gate.set()
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, DeviceError) for error in errors)
        await until(lambda: setup.failures)
        assert len(setup.failures) == 1
        assert setup.engine.phase is Phase.FAILED
        with pytest.raises(NotReady):
            await setup.arrays(pixels(1))


async def test_failed_engine_stays_failed_when_closed() -> None:
    async with engine() as setup:
        setup.network.dead = True
        with pytest.raises(DeviceError):
            await setup.arrays(pixels(1))
        await until(lambda: setup.failures)
        await setup.engine.close(within_s=0)
        assert setup.engine.phase is Phase.FAILED


@pytest.mark.usefixtures("anywhere")
async def test_device_dead_at_warm_up() -> None:
    async with engine(start=False) as setup:
        setup.network.dead = True
        with pytest.raises(DeviceError, match="warm-up"):
            await setup.engine.start()
        assert setup.engine.phase is Phase.FAILED
        assert not setup.failures


async def test_nothing_is_admitted_before_warm_up() -> None:
    async with engine(start=False) as setup:
        with pytest.raises(NotReady, match="warming up"):
            await setup.arrays(pixels(1))
        await setup.engine.start()


async def test_quick_step_leaves_the_threads_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.get_num_threads()
    network = CountsThreads()
    try:
        torch.set_num_threads(1)  # what a quick step left on the event loop
        step = make_step(
            network, (1, 8, 8), max_batch=2, device=torch.device("cpu"), compiled=False, default_threads=usual + 1
        )
        step.warm_up()
        step.fetch(0, 1)
    finally:
        torch.set_num_threads(usual)
    assert network.threads[-1] == usual + 1


class TimeAnImage(FakePipeline):
    """A millisecond an image."""

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        time.sleep(0.001 * len(images))
        return super().__call__(images)


async def test_step_with_a_slow_full_batch_is_not_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.eager.QUICK_SECONDS", 0.008)
    step = make_step(TimeAnImage(), (1, 8, 8), max_batch=8, device=torch.device("cpu"), compiled=False)
    step.warm_up()
    assert not step.quick


async def test_every_bucket_is_warmed_up() -> None:
    assert buckets_to(1) == (1,)
    assert buckets_to(6) == (1, 2, 4, 6)
    assert buckets_to(8) == (1, 2, 4, 8)
    network = FakePipeline()
    step = EagerStep(network, (1, 8, 8), max_batch=6, device=torch.device("cpu"))
    step.warm_up()
    assert network.sizes == [1, 2, 4, 6, 1, 1, 1]  # and then one image alone is timed


async def test_fixed_shapes_pad_to_buckets_and_never_answer_the_padding() -> None:
    network = FakePipeline()
    step = EagerStep(network, (1, 8, 8), max_batch=8, device=torch.device("cpu"), fixed_shapes=True)
    step.input(0)[:] = 77
    step.input(0)[:3] = stack(pixels(1), pixels(2), pixels(3))
    packed = step.fetch(0, 3)
    assert network.sizes == [4]
    np.testing.assert_allclose(packed, outputs_of(torch.from_numpy(stack(pixels(1), pixels(2), pixels(3)))))


async def test_the_deadline_is_kept_while_the_device_is_busy() -> None:
    async with engine() as setup:
        setup.network.gate.clear()
        running = asyncio.create_task(setup.arrays(pixels(1), deadline_s=0.05))
        waiting = asyncio.create_task(setup.arrays(pixels(2), deadline_s=0.05))
        await asyncio.sleep(0.1)
        setup.engine.sweep()
        for task in (running, waiting):
            with pytest.raises(DeadlineExceeded):
                await task
        setup.network.gate.set()
        assert len(await setup.arrays(pixels(3))) == 1


async def test_request_of_a_client_that_left_never_reaches_the_device() -> None:
    left = False

    async with engine() as setup:
        setup.network.gate.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await asyncio.sleep(0.05)
        gone = asyncio.create_task(setup.arrays(*[pixels(2)] * 5, disconnected=lambda: left))
        await until(lambda: setup.engine.pending == 5)
        setup.engine.sweep()
        assert setup.engine.pending == 5
        left = True
        setup.engine.sweep()
        with pytest.raises(ClientGone):
            await gone
        assert setup.engine.pending == 0
        setup.network.gate.set()
        await first
        assert setup.network.sizes == [1]


async def test_cancelled_handler_drops_its_request() -> None:
    async with engine() as setup:
        setup.network.gate.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await asyncio.sleep(0.05)
        task = asyncio.create_task(setup.arrays(pixels(2)))
        await until(lambda: setup.engine.pending == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert setup.engine.pending == 0
        setup.network.gate.set()
        await first


async def test_a_full_queue_refuses_without_decoding() -> None:
    async with engine(queue=4) as setup:
        setup.network.gate.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(setup.arrays(*[pixels(2)] * 4))
        await until(lambda: setup.engine.pending == 4)
        with pytest.raises(QueueFull, match="4 of 4 places"):
            await setup.engine.predict([EncodedImage(b"never looked at")], deadline_s=10)
        setup.network.gate.set()
        await asyncio.gather(first, waiting)


async def test_closing_finishes_what_was_admitted() -> None:
    async with engine() as setup:
        setup.network.seconds = 0.01
        requests = [asyncio.create_task(setup.arrays(*[pixels(k)] * 10)) for k in range(5)]
        await until(lambda: setup.engine.pending > 0)
        closing = asyncio.create_task(setup.engine.close(within_s=10))
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            await setup.arrays(pixels(1))
        answers = await asyncio.gather(*requests)
        assert [len(packed) for packed in answers] == [10] * 5
        await closing
        assert setup.engine.phase is Phase.CLOSED


async def test_closing_gives_up_on_a_device_that_hangs() -> None:
    async with engine() as setup:
        setup.network.gate.clear()
        task = asyncio.create_task(setup.arrays(pixels(1)))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(setup.engine.close(within_s=0.05))
        with pytest.raises(NotReady, match="shutting down"):
            await task
        setup.network.gate.set()
        await closing


@pytest.mark.usefixtures("anywhere")
async def test_explanations_are_whole_even_across_batches() -> None:
    async with engine() as setup:
        images = stack(*(pixels(k) for k in range(20)))
        answer = await setup.engine.predict(images, deadline_s=10, explain=True)
        brightness = images.mean((1, 2, 3)) / 255.0
        np.testing.assert_allclose(answer.explanation["aleatoric"], brightness, atol=1e-6)
        assert answer.explanation["class_distances"].shape == (20, 3)
        assert len(answer.packed) == 20


class SlowStep(EagerStep):
    """Two slots, like a GPU: a launch returns at once and is done when its event is set."""

    slots = 2

    def __init__(self, network: FakePipeline, *, max_batch: int) -> None:
        super().__init__(network, (1, 8, 8), max_batch=max_batch, device=torch.device("cpu"))
        self.network = network
        self.buffers = [np.zeros((max_batch, 1, 8, 8), np.uint8) for _ in range(2)]
        self.launched: list[int] = []
        self.finish = True

    def input(self, slot: int) -> Any:
        return self.buffers[slot]

    def warm_up(self) -> None:
        pass

    def launch(self, slot: int, count: int) -> None:
        self.launched.append(count)

    def done(self, slot: int) -> bool:
        return self.finish

    def fetch(self, slot: int, count: int) -> Any:
        return self.network(torch.from_numpy(self.buffers[slot][:count])).numpy()


async def test_only_a_full_batch_is_launched_behind_the_running_one() -> None:
    network = FakePipeline()
    step = SlowStep(network, max_batch=4)
    with ThreadPoolExecutor(1) as pool:
        decoder = Decoder(pool, threads=1, preprocess=PREPROCESS, max_pixels=100, inline_bytes=0)
        made = Engine(
            "m",
            step,
            decoder,
            batcher=Batcher(max_batch_size=4, max_queue_images=100),
            observer=Metrics(),
            on_failure=lambda error: None,
        )
        await made.start()
        step.launched.clear()
        step.finish = False
        first = asyncio.create_task(made.predict(stack(pixels(1)), deadline_s=10))
        await until(lambda: step.launched == [1])
        small = asyncio.create_task(made.predict(stack(pixels(2)), deadline_s=10))
        await asyncio.sleep(0.02)
        assert step.launched == [1]
        large = asyncio.create_task(made.predict(stack(*[pixels(3)] * 5), deadline_s=10))
        await until(lambda: len(step.launched) >= 2)
        assert step.launched[1] == 4
        step.finish = True
        answers = await asyncio.gather(first, small, large)
        for answer, value in zip(answers, (1, 2, 3), strict=True):
            expected = outputs_of(torch.from_numpy(stack(*[pixels(value)] * len(answer.packed)))).numpy()
            np.testing.assert_allclose(answer.packed, expected, atol=1e-6)
        await made.close(within_s=5)
