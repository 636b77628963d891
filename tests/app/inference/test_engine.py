"""The engine: right outputs for every image, and only the requests at fault fail."""

from __future__ import annotations

import asyncio
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
from app.inference.batcher import RequestMode
from app.inference.decoder import EncodedImage
from app.inference.engine import Phase
from psc_core.errors import DeviceError
from tests.app.fakes import NOT_FINITE, outputs_of, pixels, png
from tests.app.inference.support import engine, stack
from tests.app.support import until

pytestmark = pytest.mark.anyio


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


async def test_small_files_of_many_pixels_are_decoded_on_threads() -> None:
    async with engine() as setup:
        decoder = setup.decoder
        assert decoder.decode_now([EncodedImage(png(0, size=90))]) is not None
        assert decoder.decode_now([EncodedImage(png(0, size=90))] * 3) is None
        with pytest.raises(ImageRefused, match="at most 10000 pixels"):
            await setup.engine.predict([EncodedImage(png(0, size=200))])


@pytest.mark.usefixtures("device_thread")
async def test_waiting_requests_run_as_one_batch() -> None:
    async with engine() as setup:
        setup.network.check.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.network.sizes)
        others = [asyncio.create_task(setup.arrays(pixels(k))) for k in range(6)]
        await until(lambda: setup.engine.pending == 6)
        setup.network.check.set()
        await asyncio.gather(first, *others)
        assert setup.network.sizes == [1, 6]


@pytest.mark.usefixtures("anywhere")
async def test_outputs_that_are_not_finite() -> None:
    async with engine(delay_ms=50) as setup:
        good, bad = setup.arrays(pixels(1)), setup.arrays(pixels(2), pixels(3, first=NOT_FINITE))
        packed, error = await asyncio.gather(good, bad, return_exceptions=True)
        assert np.isfinite(packed).all()
        assert isinstance(error, InferenceFailed)
        assert "image 1" in str(error)


async def test_failed_engine_stays_failed_when_closed() -> None:
    async with engine() as setup:
        setup.network.dead = True
        with pytest.raises(DeviceError):
            await setup.arrays(pixels(1))
        await until(lambda: setup.engine.device_error is not None)
        await setup.engine.close(within_s=0)
        assert setup.engine.phase is Phase.FAILED


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
        setup.network.check.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.network.sizes)
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
        setup.network.check.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.network.sizes)
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
        setup.network.check.clear()
        first = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.network.sizes)
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
async def test_closing_waits_for_answers_on_their_way_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as setup:
        on_their_way: list[tuple[Any, ...]] = []
        monkeypatch.setattr(setup.engine, "_call_on_loop", lambda *call: on_their_way.append(call))
        answer = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: on_their_way)
        closing = asyncio.create_task(setup.engine.close(within_s=60))
        await asyncio.wait({closing}, timeout=0.2)  # Too long for an engine that does not wait, which is closed now.
        assert not closing.done()
        for action, *arguments in on_their_way:
            action(*arguments)
        await closing
        assert answer.done() and len(await answer) == 1


@pytest.mark.usefixtures("device_thread")
async def test_closing_gives_up_on_a_device_that_hangs() -> None:
    async with engine() as setup:
        setup.network.check.clear()
        task = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.network.sizes)
        closing = asyncio.create_task(setup.engine.close(within_s=0.05))
        with pytest.raises(NotReady, match="shutting down"):
            await task
        setup.network.check.set()
        await closing


@pytest.mark.usefixtures("device_thread")
async def test_deadlines_are_kept_while_closing() -> None:
    async with engine(deadline_s=0.05) as setup:
        setup.network.check.clear()
        task = asyncio.create_task(setup.arrays(pixels(1)))
        await until(lambda: setup.network.sizes)
        closing = asyncio.create_task(setup.engine.close(within_s=60))
        with pytest.raises(DeadlineExceeded):
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


@pytest.mark.usefixtures("anywhere")
async def test_a_map_alone_takes_no_explanation() -> None:
    async with engine() as setup:
        images = stack(*(pixels(k) for k in range(20)))
        expected = await setup.engine.predict(images)
        answer = await setup.engine.predict(images, mode=RequestMode.MAP)
        np.testing.assert_array_equal(answer.packed, expected.packed)
        assert answer.explanation.keys() == {"map"}
        np.testing.assert_array_equal(answer.explanation["map"], images[:, 0])
