"""An engine with fakes around it, and shorthands for its queue."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from app.inference.batcher import Batcher, DeviceBatch, QueuedRequest, RequestMode, Result
from app.inference.decoder import Decoder
from app.inference.engine import Engine
from app.inference.steps import TorchThreads, make_step
from app.memory import MemoryBudget
from app.settings import load_settings
from psc_core.images.preprocess import Preprocess
from tests.app.fakes import PREPROCESS, FakePipeline

PREDICT, EXPLAIN = RequestMode.PREDICT, RequestMode.EXPLAIN

NO_IMAGES = np.empty((0, 1, 8, 8), np.uint8)  # for tests that never compute


def make(batch: int = 8, queue: int = 100, delay: float = 0.0, **options: Any) -> Batcher:
    return Batcher(max_batch=batch, max_queue_images=queue, max_delay_s=delay, **options)


def admit(
    batcher: Batcher, count: int, now: float = 0.0, deadline: float = 1e9, mode: RequestMode = PREDICT
) -> QueuedRequest:
    request = batcher.reserve(count, now=now, deadline=deadline, mode=mode)
    assert batcher.put(request, NO_IMAGES, now=now)
    return request


def blank(count: int) -> Result:
    return Result(np.zeros((count, 1), np.float32))


def complete(batcher: Batcher, batch: DeviceBatch, now: float) -> None:
    batcher.complete(batch, blank(batch.size), now=now)


class Metrics:
    def __init__(self) -> None:
        self.batches: list[int] = []

    def batch(self, size: int, seconds: float, waits: Any) -> None:
        self.batches.append(size)

    def decoded(self, seconds: float) -> None:
        pass


class Setup:
    def __init__(self, engine: Engine, decoder: Decoder, network: FakePipeline, metrics: Metrics) -> None:
        self.engine, self.decoder, self.network, self.metrics = engine, decoder, network, metrics

    async def arrays(self, *images: Any, **options: Any) -> Any:
        return (await self.engine.predict(stack(*images), **options)).packed


def stack(*images: Any) -> Any:
    return np.stack([image[None] for image in images])


def decoder_on(
    pool: ThreadPoolExecutor, *, threads: int, inline_bytes: int, preprocess: Preprocess = PREPROCESS
) -> Decoder:
    limits = {"max_pixels": 10_000, "max_pixels_per_request": 1 << 20, "inline_decode_bytes": inline_bytes}
    settings = load_settings({"decode_threads": threads, **limits})
    return Decoder(pool, MemoryBudget(1 << 30, 1 << 40, max_pixels=10_000), preprocess, settings)


@asynccontextmanager
async def engine(
    *,
    max_batch: int = 8,
    queue: int = 1000,
    inline: int = 1 << 20,
    start: bool = True,
    delay_ms: float = 0.0,
    deadline_s: float = 10.0,
    threads: int = 1,
) -> AsyncIterator[Setup]:
    network, metrics = FakePipeline(), Metrics()
    with ThreadPoolExecutor(2) as pool:
        decoder = decoder_on(pool, threads=2, inline_bytes=inline)
        shape, cpu = PREPROCESS.shape, torch.device("cpu")
        step = make_step(network, shape, max_batch=max_batch, device=cpu, threads=TorchThreads(threads, 1))
        made = Engine(
            "m",
            step,
            decoder,
            batcher=Batcher(max_batch=max_batch, max_queue_images=queue, max_delay_s=delay_ms / 1000),
            recorder=metrics,
            deadline_s=deadline_s,
        )
        setup = Setup(made, decoder, network, metrics)
        if start:
            await made.start()
            network.sizes.clear()
        yield setup
        network.check.set()
        await made.close(within_s=5)
