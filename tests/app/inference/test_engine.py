"""The engine: right outputs for every image, and only the requests at fault fail."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from PIL.PngImagePlugin import PngInfo

from app.errors import ClientGone, DeadlineExceeded, ImageRefused, InferenceFailed, NotReady, QueueFull
from app.inference.batcher import Batcher, RequestMode, Result
from app.inference.decoder import EncodedImage
from app.inference.engine import Engine, Phase
from app.inference.steps import EagerStep
from psc_core.errors import DeviceError
from tests.app.fakes import NOT_FINITE, POISON, FakePipeline, outputs_of, pixels, png
from tests.app.inference.support import Metrics, Setup, decoder_on, engine, stack
from tests.app.support import until
from tests.encoded import encode

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["on its thread", "on the event loop"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 0.0 if request.param == "on its thread" else 60.0)


async def hold(setup: Setup) -> asyncio.Task[Any]:
    setup.network.check.clear()
    task = asyncio.create_task(setup.arrays(pixels(1)))
    await until(lambda: setup.network.sizes)
    return task


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
        packed = (await setup.engine.predict(uploads)).packed
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
            await setup.engine.predict(uploads)
        assert (caught.value.index, caught.value.name) == (1, "a.txt")
        assert setup.engine.pending == 0
        assert setup.network.sizes == []


async def test_small_files_of_many_pixels_or_much_text_are_decoded_on_threads() -> None:
    async with engine() as setup:
        decoder = setup.decoder
        assert decoder.decode_now([EncodedImage(png(0, size=90))]) is not None
        assert decoder.decode_now([EncodedImage(png(0, size=90))] * 3) is None
        info = PngInfo()
        info.add_text("Comment", "x" * 1000, zip=True)
        assert decoder.decode_now([EncodedImage(encode(np.zeros((9, 9), np.uint8), pnginfo=info))]) is None
        with pytest.raises(ImageRefused, match="at most 10000 pixels"):
            await setup.engine.predict([EncodedImage(png(0, size=200))])


@pytest.mark.usefixtures("device_thread")
async def test_waiting_requests_run_as_one_batch() -> None:
    async with engine() as setup:
        first = await hold(setup)
        others = [asyncio.create_task(setup.arrays(pixels(k))) for k in range(6)]
        await until(lambda: setup.engine.pending == 6)
        setup.network.check.set()
        await asyncio.gather(first, *others)
        assert setup.network.sizes == [1, 6]


@pytest.mark.usefixtures("device_thread")
async def test_a_cpu_computes_two_batches_at_once() -> None:
    async with engine(threads=2) as setup:
        await until(lambda: len({*setup.network.callers}) == 2)  # The second thread has checked the device.
        setup.network.sizes.clear()
        first = await hold(setup)
        other = asyncio.create_task(setup.arrays(pixels(2)))
        await until(lambda: len(setup.network.sizes) == 2)
        setup.network.check.set()
        for answer, value in zip(await asyncio.gather(first, other), (1, 2), strict=True):
            expected = outputs_of(torch.from_numpy(stack(pixels(value)))).numpy()
            np.testing.assert_allclose(answer, expected, atol=1e-6)
        assert len({*setup.network.callers[-2:]}) == 2


@pytest.mark.usefixtures("anywhere")
async def test_outputs_that_are_not_finite() -> None:
    async with engine(delay_ms=50) as setup:
        good, bad = setup.arrays(pixels(1)), setup.arrays(pixels(2), pixels(3, first=NOT_FINITE))
        packed, error = await asyncio.gather(good, bad, return_exceptions=True)
        assert np.isfinite(packed).all()
        assert isinstance(error, InferenceFailed)
        assert "image 1" in str(error)


async def test_nothing_is_admitted_before_warm_up() -> None:
    async with engine(start=False) as setup:
        with pytest.raises(NotReady, match="warming up"):
            await setup.arrays(pixels(1))
        await setup.engine.start()


@pytest.mark.usefixtures("device_thread")
async def test_the_deadline_is_kept_while_the_device_is_busy() -> None:
    async with engine(deadline_s=0.05) as setup:
        setup.network.check.clear()
        running = asyncio.create_task(setup.arrays(pixels(1)))
        waiting = asyncio.create_task(setup.arrays(pixels(2)))

        def ended() -> bool:
            setup.engine.sweep()
            return running.done() and waiting.done()

        await until(ended)
        for task in (running, waiting):
            with pytest.raises(DeadlineExceeded):
                await task


@pytest.mark.usefixtures("device_thread")
async def test_request_of_a_client_that_left_never_reaches_the_device() -> None:
    left = False

    async with engine() as setup:
        first = await hold(setup)
        gone = asyncio.create_task(setup.arrays(*[pixels(2)] * 5, disconnected=lambda: left))
        await until(lambda: setup.engine.pending == 5)
        setup.engine.sweep()
        assert setup.engine.pending == 5
        left = True
        setup.engine.sweep()
        with pytest.raises(ClientGone):
            await gone
        assert setup.engine.pending == 0
        setup.network.check.set()
        await first
        assert setup.network.sizes == [1]


@pytest.mark.usefixtures("device_thread")
async def test_cancelled_handler_drops_its_request() -> None:
    async with engine() as setup:
        first = await hold(setup)
        task = asyncio.create_task(setup.arrays(pixels(2)))
        await until(lambda: setup.engine.pending == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert setup.engine.pending == 0
        setup.network.check.set()
        await first


@pytest.mark.usefixtures("device_thread")
async def test_a_full_queue_refuses_without_decoding() -> None:
    async with engine(queue=4) as setup:
        first = await hold(setup)
        waiting = asyncio.create_task(setup.arrays(*[pixels(2)] * 4))
        await until(lambda: setup.engine.pending == 4)
        with pytest.raises(QueueFull, match="4 of 4 places"):
            await setup.engine.predict([EncodedImage(b"never looked at")])
        setup.network.check.set()
        await asyncio.gather(first, waiting)


@pytest.mark.usefixtures("device_thread")
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


@pytest.mark.usefixtures("device_thread")
@pytest.mark.parametrize(
    ("deadline_s", "within_s", "error", "message"),
    [(10.0, 0.05, NotReady, "shutting down"), (0.05, 60.0, DeadlineExceeded, None)],
)
async def test_closing_waits_for_a_device_that_hangs_no_longer_than_it_or_the_deadline_says(
    deadline_s: float, within_s: float, error: type[Exception], message: str | None
) -> None:
    async with engine(deadline_s=deadline_s) as setup:
        task = await hold(setup)
        closing = asyncio.create_task(setup.engine.close(within_s=within_s))
        with pytest.raises(error, match=message):
            await task
        setup.network.check.set()
        await closing


@pytest.mark.usefixtures("anywhere")
async def test_explanations_are_whole_even_across_batches() -> None:
    async with engine() as setup:
        images = stack(*(pixels(k) for k in range(20)))
        answer = await setup.engine.predict(images, mode=RequestMode.EXPLAIN)
        brightness = images.mean((1, 2, 3)) / 255.0
        np.testing.assert_allclose(answer.explanation["aleatoric"], brightness, atol=1e-6)
        assert answer.explanation["class_distances"].shape == (20, 3) and "map" not in answer.explanation
        answer = await setup.engine.predict(images, mode=RequestMode.EXPLAIN_WITH_MAP)
        np.testing.assert_array_equal(answer.explanation["map"], images[:, 0])
        assert len(answer.packed) == 20 and "aleatoric" in answer.explanation
        answer = await setup.engine.predict(images, mode=RequestMode.MAP)
        np.testing.assert_array_equal(answer.packed, (await setup.engine.predict(images)).packed)
        assert answer.explanation.keys() == {"map"}


@pytest.mark.usefixtures("anywhere")
async def test_out_of_memory_splits_the_batch_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[list[int]] = []
    async with engine() as setup:
        setup.network.memory = 3
        monkeypatch.setattr(EagerStep, "release_memory", lambda self: released.append(list(setup.network.sizes)))
        packed = await setup.arrays(*(pixels(k) for k in range(8)))
        expected = outputs_of(torch.from_numpy(stack(*(pixels(k) for k in range(8))))).numpy()
        np.testing.assert_allclose(packed, expected, atol=1e-6)
        assert released[0] == [8] and setup.network.sizes[-1] == 2
        assert setup.engine.phase is Phase.READY


@pytest.mark.usefixtures("anywhere")
async def test_no_memory_even_for_one_image_fails_that_request_only() -> None:
    async with engine() as setup:
        setup.network.memory = 0
        with pytest.raises(DeviceError):
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
        assert setup.engine.device_error is None


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


async def where_steps_run(setup: Setup) -> set[int]:
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


@pytest.mark.usefixtures("anywhere")
async def test_dead_device_fails_everything_and_is_reported() -> None:
    async with engine() as setup:
        setup.network.dead = True
        requests = [setup.arrays(pixels(k), pixels(k)) for k in range(20)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, (DeviceError, NotReady)) for error in errors)
        await until(lambda: setup.engine.device_error is not None)
        with pytest.raises(NotReady):
            await setup.arrays(pixels(1))
        await setup.engine.close(within_s=0)
        assert setup.engine.phase is Phase.FAILED


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
            "m", step, decoder, batcher=Batcher(max_batch=4, max_queue_images=100), recorder=Metrics(), deadline_s=10
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
