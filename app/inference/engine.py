"""Answer one model's requests: a request is reserved, decoded, queued, batched, computed and answered, in this order.

::

    Engine.predict ─ reserve ─▶ decode (at once, or on threads) ─▶ queue ─▶ DeviceWorker ─▶ future ─▶ Engine.predict

Decoding and computing overlap.  The event loop, the decode threads and the device thread meet only in the queue.
Requests that are decoded in one turn of the loop are put into the queue together, the decode threads put theirs, and a
batch's results come back in one call, so the number of hops between threads grows with the batches, not with the
requests.  A step that takes less time than such a hop runs on the event loop itself, as soon as a turn of the loop
brings no more requests or a batch is full.  Every admitted request ends in a result or an error.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from app.errors import ImageRefused, NotReady, TooManyPixels
from app.inference.batcher import Batcher, Images, QueuedRequest, RequestMode, RequestQueue, Result, State
from app.inference.decoder import DecodedImages, Decoder, EncodedImage
from app.inference.steps import Step
from app.inference.worker import DeviceWorker
from app.metrics import ModelRecorder
from psc_core.errors import DeviceError, PSCError

logger = logging.getLogger("psc.engine")


class Phase(enum.Enum):
    """The phase of an engine's life."""

    WARMING = "warming up"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "device failed"
    CLOSED = "closed"


class Engine:
    """Batches requests for one model; create, call, and close it on one event loop.

    Nobody else may use its step and its batcher.
    """

    def __init__(
        self, name: str, step: Step, decoder: Decoder, *, batcher: Batcher, recorder: ModelRecorder, deadline_s: float
    ) -> None:
        self.name = name
        self._deadline_s = deadline_s  # the time in which each request is answered, seconds
        self.phase = Phase.WARMING
        self.device_error: Exception | None = None  # what killed the device after warm-up
        self._decoder = decoder
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[QueuedRequest, Callable[[], bool] | None] = {}
        self._arrived: list[tuple[QueuedRequest, Images]] = []  # in this turn; the loop alone touches it: no lock
        self._queue = RequestQueue(batcher, self._deliver)
        self._step = step
        self._workers: list[DeviceWorker] = []
        self._worker = self._add_worker(
            step, may_run_inline=batcher.max_delay_s == 0, on_ready=lambda: self._call_on_loop(self._ready)
        )

    @property
    def pending(self) -> int:
        """The number of images admitted and not yet on the device."""
        with self._queue as batcher:
            return batcher.pending

    async def start(self) -> None:
        """Warm up, and return when the engine is ready."""
        self._worker.thread.start()
        await self._started

    def check_room(self, mode: RequestMode = RequestMode.PREDICT) -> None:
        """Refuse a request, before its body is read, if not even one image would be admitted now."""
        self._check_warm()
        now = time.monotonic()
        with self._queue as batcher:
            batcher.check(1, now=now, deadline=now + self._deadline_s, mode=mode)

    async def predict(
        self,
        images: Sequence[EncodedImage] | Images,
        *,
        disconnected: Callable[[], bool] | None = None,
        mode: RequestMode = RequestMode.PREDICT,
    ) -> Result:
        """Compute the network's outputs for the images of one request, at least one.

        ``disconnected`` is called now and then; once it returns True, the client has left, and its images are dropped.
        """
        self._check_warm()
        size = len(images) * self._decoder.image_bytes
        self._decoder.memory.take(size)
        try:
            return await self._predict(images, disconnected, mode)
        finally:
            self._decoder.memory.give(size)

    async def _predict(
        self, images: Sequence[EncodedImage] | Images, disconnected: Callable[[], bool] | None, mode: RequestMode
    ) -> Result:
        done: asyncio.Future[Result] = self._loop.create_future()
        now = time.monotonic()
        came = images.began if isinstance(images, DecodedImages) else now
        deadline = came + self._deadline_s
        with self._queue as batcher:
            request = batcher.reserve(len(images), now=now, deadline=deadline, mode=mode, waiter=done, came=came)
        if isinstance(images, np.ndarray):
            self._arrive(request, images)
        elif isinstance(images, DecodedImages):
            self._recorder.decoded(images.seconds)
            self._arrive(request, images.pixels)
        else:
            self._decode(request, images)
        self._waiting[request] = disconnected
        try:
            return await done
        except asyncio.CancelledError:
            # Nobody waits any more, so images that the device has not taken yet make room for others.
            with self._queue as batcher:
                batcher.cancel(request)
            raise
        finally:
            del self._waiting[request]

    def _decode(self, request: QueuedRequest, images: Sequence[EncodedImage]) -> None:
        began = time.monotonic()

        def on_done(decoded: Images, error: Exception | None) -> None:
            self._recorder.decoded(time.monotonic() - began)
            if error is None:
                # This runs on a decode thread.
                if self._worker.inline:
                    self._call_on_loop(self._arrive, request, decoded)
                else:
                    self._queue.put([(request, decoded)])
                return
            if not isinstance(error, (ImageRefused, TooManyPixels)):
                logger.error("decoding failed", exc_info=error)
            self._fail(request, error)

        try:
            decoded = self._decoder.decode_now(images)
            if decoded is None:
                # The state is read without the lock: at worst, a thread decodes one image in vain.
                is_wanted = lambda: request.state is State.RESERVED  # noqa: E731
                self._decoder.decode_later(images, is_wanted=is_wanted, on_done=on_done)
            else:
                self._recorder.decoded(time.monotonic() - began)
                self._arrive(request, decoded)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: QueuedRequest, error: Exception) -> None:
        with self._queue as batcher:
            batcher.finish(request, error)

    def _arrive(self, request: QueuedRequest, images: Images) -> None:
        """Queue a request with those that come in the same turn of the loop; together they wake the worker once."""
        if not self._arrived:
            self._loop.call_soon(self._put_arrived)
        self._arrived.append((request, images))

    def _put_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._queue.put(arrived)
        if self._worker.inline:
            with self._queue as batcher:
                full = batcher.pending >= batcher.max_batch
            if full:
                self._worker.run_due()
            else:
                self._loop.call_soon(self._run_unless_more_came)

    def _run_unless_more_came(self) -> None:
        """Compute the queued requests, unless the last turn of the loop brought more, which make a fuller batch."""
        if not self._arrived:
            self._worker.run_due()

    def _deliver(self, requests: list[QueuedRequest]) -> None:
        if threading.get_ident() == self._loop_thread:
            self._resolve(requests)
        else:
            self._call_on_loop(self._resolve, requests)

    def _resolve(self, requests: list[QueuedRequest]) -> None:
        for request in requests:
            done: asyncio.Future[Result] = request.waiter
            # A cancelled handler has cancelled its future, and setting the result of a done future raises.
            if done.done():
                continue
            if request.error is None:
                done.set_result(request.result())
            else:
                done.set_exception(request.error)
                # Mark the error as retrieved: the waiter may be gone, and asyncio would log it as never retrieved.
                done.exception()

    def sweep(self) -> None:
        """Fail requests past their deadline and drop those whose clients left; to be called a few times a second."""
        left = [request for request, disconnected in self._waiting.items() if disconnected and disconnected()]
        with self._queue as batcher:
            for request in left:
                batcher.cancel(request)
            batcher.expire(time.monotonic())

    def stop_admitting(self, reason: str) -> None:
        """Admit no more requests; those that were admitted are finished."""
        if self.phase in (Phase.WARMING, Phase.READY):
            self.phase = Phase.DRAINING
        with self._queue as batcher:
            batcher.close(reason)

    async def close(self, *, within_s: float) -> None:
        """Finish the admitted requests, fail those left after ``within_s`` seconds, and end the thread."""
        self.stop_admitting("the model is shutting down; try again")
        end = time.monotonic() + within_s
        # The handlers and not the queue, which is empty while the last answers are still on their way to the loop.
        while self._waiting and time.monotonic() < end:
            self.sweep()
            await asyncio.sleep(0.01)
        with self._queue as batcher:
            batcher.fail_all(NotReady("the service is shutting down; try again"))
        self._queue.stop()
        end = time.monotonic() + min(5.0, max(0.1, end - time.monotonic()))
        # Polled and not joined: the join would need a thread, and if the device hangs, that thread keeps this model.
        while (any(each.thread.is_alive() for each in self._workers) or self._waiting) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if self.phase is not Phase.FAILED:
            self.phase = Phase.CLOSED

    def _check_warm(self) -> None:
        if self.phase is Phase.WARMING:
            raise NotReady(f"model {self.name!r} is warming up; try again in a few seconds")

    def _call_on_loop(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            # asyncio raises RuntimeError for a closed loop, which the device thread may outlive.
            logger.debug("the event loop is closed; nobody waits for %s", action)

    def _ready(self) -> None:
        # An engine that was told to drain while its thread warmed up goes on draining.
        if self.phase is Phase.WARMING:
            self.phase = Phase.READY
        if not self._worker.inline and not self._queue.stopped and (other := self._step.beside()) is not None:
            self._add_worker(other).thread.start()
        if not self._started.done():
            self._started.set_result(None)

    def _add_worker(self, step: Step, **options: Any) -> DeviceWorker:
        worker = DeviceWorker(
            self._queue,
            step,
            self._recorder,
            name=f"psc-device-{self.name}-{len(self._workers)}",
            on_failed=lambda error: self._call_on_loop(self._device_failed, error),
            **options,
        )
        self._workers.append(worker)
        return worker

    def _device_failed(self, error: Exception) -> None:
        self.phase = Phase.FAILED
        if not self._started.done():
            reason = str(error) if isinstance(error, PSCError) else f"{type(error).__name__}, see the log"
            self._started.set_exception(DeviceError(f"model {self.name!r} failed at warm-up: {reason}"))
        else:
            self.device_error = error
