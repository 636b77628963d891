"""One model's way from encoded images to rows: decode │ device │ respond, three stages that overlap.

::

    handler ─ reserve ─▶ decode (at once, or thread pool) ─▶ put ─▶ device thread ─▶ future ─▶ handler

The event loop and the device thread meet only in the queue.  Requests that arrive in one turn of the loop
are put together, and a batch's answers come back in one call, so the number of hops between threads follows
the number of batches, not of requests.  A step that is quicker than such a hop runs on the event loop itself,
once a turn of it brings no more requests or a batch is full.  Every admitted request ends in rows or in an error.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from starlette.types import Receive

from app.batching import Batch, Batcher, BatchQueue, Job, State
from app.decoding import Decoder
from app.device import EXPLAIN, Block, DeviceThread, Work
from app.errors import ClientGone, ImageRefused, NotReady
from app.step import Images, Step
from app.uploads import Upload
from app.watch import has_left
from psc_core.errors import DeviceError
from psc_core.model.decision import Rows

logger = logging.getLogger("psc.engine")

PREDICT = "predict"


class Phase(enum.Enum):
    """Where an engine is in its life."""

    WARMING = "warming up"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "device failed"
    CLOSED = "closed"


class Answer(NamedTuple):
    """What the device said of a request's images.

    Attributes:
        block: Holds their rows, perhaps among others.
        start: Where theirs begin.
        size: How many they are.
        explanation: When asked for, its arrays, images first.
    """

    block: Block
    start: int
    size: int
    explanation: dict[str, npt.NDArray[Any]]

    @property
    def rows(self) -> Rows:
        """``float32 (n, SCORES + K)``."""
        return self.block.rows[self.start : self.start + self.size]


class EngineMetrics(Protocol):
    """What an engine reports, from any thread."""

    def batch(self, size: int, seconds: float, waits: Sequence[float]) -> None: ...

    def decoded(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Sizes and times of the queue; see the settings of the same names."""

    max_batch_size: int
    max_queue_images: int
    max_delay_ms: float


class Engine:
    """Batches requests for one model; create, call, and close it on one event loop.

    Args:
        name: For threads and logs.
        step: The device computation, used by this engine's thread only.
        decoder: Bytes to arrays.
        limits: Of the queue.
        metrics: Told of batches and decodes.
        on_failure: Called on the event loop, once, when the device is dead.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        decoder: Decoder,
        *,
        limits: Limits,
        metrics: EngineMetrics,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.phase = Phase.WARMING
        self._decoder = decoder
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._on_failure = on_failure
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._arrivals: list[Job] = []
        self._max_batch = limits.max_batch_size
        self._watched: dict[Job, Receive] = {}
        batcher = Batcher(
            max_batch_size=limits.max_batch_size,
            max_queue_images=limits.max_queue_images,
            max_delay_s=limits.max_delay_ms / 1000.0,
        )
        self._queue = BatchQueue(batcher, self._deliver)
        self._clock = self._queue.clock
        self._thread = DeviceThread(
            self._queue,
            step,
            on_ready=lambda: self._tell(self._ready),
            on_failure=lambda error: self._tell(self._failed, error),
            on_batch=self._measured,
            name=f"psc-device-{name}",
            inline=limits.max_delay_ms == 0,
        )

    @property
    def pending(self) -> int:
        """Images admitted and not yet on the device."""
        return self._queue.pending

    async def start(self) -> None:
        """Warm up every shape; returns when the engine is ready.

        Raises:
            DeviceError: The network failed while it was warmed up.
        """
        self._thread.start()
        await self._started

    def check_room(self, *, deadline_s: float) -> None:
        """Refuse before its body is read a request of which not even one image would be admitted now.

        Raises:
            NotReady: Warming up, draining or failed.
            QueueFull: No room.
        """
        self._check_warm()
        self._queue.check(1, deadline_s=deadline_s)

    async def predict_encoded(
        self,
        uploads: Sequence[Upload],
        *,
        deadline_s: float,
        receive: Receive | None = None,
        explain: bool = False,
    ) -> Answer:
        """Decode and judge images.

        Args:
            uploads: Encoded images, at least one.
            deadline_s: Seconds from now within which the answer must be there.
            receive: The request's ``receive``, its body read; the work is dropped when the client leaves.
            explain: Compute the explanation too.

        Raises:
            NotReady: Warming up, draining or failed.
            QueueFull: No room.
            ImageRefused: An image cannot be used.
            DeadlineExceeded: Not in time.
            InferenceFailed: The network failed on an image.
            DeviceError: The device failed.
            ClientGone: The client left.
        """
        job, work = self._reserve(len(uploads), deadline_s, explain)
        try:
            began = self._clock()
            images = self._decoder.decode_now(uploads)
            if images is None:
                self._decoder.decode_later(
                    uploads,
                    wanted=lambda: job.state is State.RESERVED,
                    finished=lambda images, error: self._decoded(job, images, error, began),
                )
            else:
                self._metrics.decoded(self._clock() - began)
                self._arrive(job, images)
        except Exception as error:
            self._refuse(job, error)
            raise
        return await self._answer(job, work, receive)

    async def predict_arrays(
        self, images: Images, *, deadline_s: float, receive: Receive | None = None, explain: bool = False
    ) -> Answer:
        """Judge images that are ``uint8 (n, channels, height, width)`` already; errors as above."""
        job, work = self._reserve(len(images), deadline_s, explain)
        self._arrive(job, images)
        return await self._answer(job, work, receive)

    def sweep(self) -> None:
        """Fail what is past its deadline and drop what nobody waits for; call a few times a second."""
        gone = [job for job, receive in self._watched.items() if has_left(receive)]

        def sweep(batcher: Batcher, now: float) -> None:
            for job in gone:
                batcher.cancel(job)
            batcher.expire(now)

        self._queue.call(sweep)

    def begin_drain(self, reason: str) -> None:
        """Admit nothing more; what was admitted is finished."""
        if self.phase in (Phase.WARMING, Phase.READY):
            self.phase = Phase.DRAINING
        self._queue.call(lambda batcher, _now: batcher.close(reason))

    async def close(self, *, within_s: float) -> None:
        """Finish what was admitted, fail what is left after ``within_s`` seconds, end the thread."""
        self.begin_drain("the model is shutting down; try again")
        end = self._clock() + within_s
        while not self._queue.idle and self._clock() < end:
            await asyncio.sleep(0.01)
        late = NotReady("the service is shutting down; try again")
        self._queue.call(lambda batcher, _now: batcher.fail_all(late))
        self._queue.stop()
        end = self._clock() + min(5.0, max(0.1, end - self._clock()))
        while self._thread.alive and self._clock() < end:  # a join would need a thread, which would hold the old model
            await asyncio.sleep(0.01)
        if self.phase is not Phase.FAILED:
            self.phase = Phase.CLOSED

    def _check_warm(self) -> None:
        if self.phase is Phase.WARMING:
            raise NotReady(f"model {self.name!r} is warming up; try again in a few seconds")

    def _reserve(self, count: int, deadline_s: float, explain: bool) -> tuple[Job, Work]:
        self._check_warm()
        work = Work(self._loop.create_future())
        lane = EXPLAIN if explain else PREDICT
        return self._queue.reserve(count, deadline_s=deadline_s, lane=lane, payload=work), work

    def _arrive(self, job: Job, images: Images) -> None:
        job.payload.images = images
        if not self._arrivals:
            self._loop.call_soon(self._put_arrivals)
        self._arrivals.append(job)

    def _put_arrivals(self) -> None:
        jobs, self._arrivals = self._arrivals, []
        self._queue.put(jobs)
        if self._thread.inline:
            if self._queue.pending >= self._max_batch:
                self._thread.run_due()
            else:
                self._loop.call_soon(self._run_unless_more_came)

    def _run_unless_more_came(self) -> None:
        """Compute what waits, unless the last turn of the loop brought more: the next one then has a fuller batch."""
        if not self._arrivals:
            self._thread.run_due()

    def _decoded(self, job: Job, images: npt.NDArray[np.uint8], error: Exception | None, began: float) -> None:
        self._metrics.decoded(self._clock() - began)
        if error is None:
            self._tell(self._arrive, job, images)
        else:
            if not isinstance(error, ImageRefused):
                logger.error("decoding failed", exc_info=error)
            self._refuse(job, error)

    def _refuse(self, job: Job, error: Exception) -> None:
        self._queue.call(lambda batcher, _now: batcher.fail(job, error))

    async def _answer(self, job: Job, work: Work, receive: Receive | None) -> Answer:
        if receive is not None:
            self._watched[job] = receive
        try:
            await work.future
        except asyncio.CancelledError:
            self._queue.call(lambda batcher, _now: batcher.cancel(job))
            raise
        finally:
            self._watched.pop(job, None)
        if work.block is None:
            raise ClientGone("the request was dropped")
        return Answer(work.block, work.start, job.count, work.explanation)

    def _deliver(self, jobs: list[Job]) -> None:
        if threading.get_ident() == self._loop_thread:
            self._resolve(jobs)
        else:
            self._tell(self._resolve, jobs)

    def _resolve(self, jobs: list[Job]) -> None:
        for job in jobs:
            future: asyncio.Future[None] = job.payload.future
            if future.done():
                continue
            if job.error is None:
                future.set_result(None)
            else:
                future.set_exception(job.error)
                future.exception()  # Retrieved: the waiter may be gone, and that is no warning.

    def _tell(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            logger.debug("the event loop is closed; nobody waits for %s", action)

    def _measured(self, batch: Batch, seconds: float) -> None:
        waits = [batch.taken_at - part.job.waiting_since for part in batch.slices if part.start == 0]
        self._metrics.batch(batch.size, seconds, waits)

    def _ready(self) -> None:
        if self.phase is Phase.WARMING:
            self.phase = Phase.READY
        if not self._started.done():
            self._started.set_result(None)

    def _failed(self, error: Exception) -> None:
        self.phase = Phase.FAILED
        if not self._started.done():
            self._started.set_exception(DeviceError(f"model {self.name!r} failed at warm-up: {error}"))
        else:
            self._on_failure(error)
