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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from app.errors import ImageRefused, InferenceFailed, NotReady, TooManyPixels
from app.inference.batcher import Batcher, DeviceBatch, Images, QueuedRequest, RequestMode, RequestQueue, Result, State
from app.inference.decoder import DecodedImages, Decoder, EncodedImage
from app.inference.steps import Step, is_out_of_memory, run_batch
from app.metrics import ModelRecorder
from psc_core.errors import DeviceError, PSCError

logger = logging.getLogger("psc.engine")
device_logger = logging.getLogger("psc.device")


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
            raise NotReady(f"model {self.name!r} is warming up; try again in 5 s", retry_after=5)

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

    def _add_worker(
        self, step: Step, *, may_run_inline: bool = False, on_ready: Callable[[], None] | None = None
    ) -> DeviceWorker:
        worker = DeviceWorker(
            self._queue,
            step,
            self._recorder,
            name=f"psc-device-{self.name}-{len(self._workers)}",
            may_run_inline=may_run_inline,
            on_ready=on_ready,
            on_failed=lambda error: self._call_on_loop(self._device_failed, error),
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


_POLL_S: Final = 50e-6  # the time between two looks at a running batch, seconds; short compared with that of a batch


class _Launched(NamedTuple):
    """A batch that the device is working on."""

    batch: DeviceBatch
    slot: int
    started: float


class DeviceWorker:
    """The owner of the step, and the thread on which it runs until the queue is stopped.

    Between two batches the thread does only what cannot wait: it copies images into the step's buffer, launches the
    batch and hands out results.  With a step of two slots, a full batch is launched behind the running one; a batch
    that is not full waits until the device is free, so that it can still grow.

    A quick step (:meth:`app.inference.steps.Step.warm_up`) needs no thread: the thread warms it up and ends.

    A batch that failed runs again in halves: at once if the device is out of memory, after any other error only if a
    blank image still runs.  In the end the image at fault is alone, and only its request fails.  If the blank image
    fails too, the device is dead, which ends every request.
    """

    def __init__(
        self,
        queue: RequestQueue,
        step: Step,
        recorder: ModelRecorder,
        *,
        name: str,
        may_run_inline: bool,
        on_ready: Callable[[], None] | None,
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.inline = False  # whether :meth:`run_due` is to compute the batches; known when the worker is ready
        self._queue = queue
        self._step = step
        self._recorder = recorder
        self._launched: deque[_Launched] = deque()
        self._next_slot = 0
        self._may_run_inline = may_run_inline
        # Called, as the next one is, on the thread that computes; None if another worker has warmed the step up.
        self._on_ready = on_ready
        self._on_failed = on_failed
        # A daemon thread, because a device that hangs must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def run_due(self) -> None:
        """Compute every batch that is due on the calling thread; only for an inline worker."""
        try:
            while (batch := self._queue.take(block=False)) is not None:
                self._launch(batch)
                # Explanations, and batches that failed and ran again in halves, are complete already.
                if self._launched:
                    self._finish_oldest()
        except Exception as error:
            self._end("the compute device failed", error)

    def _run(self) -> None:
        """Warm up, then serve until the queue is stopped."""
        try:
            if self._on_ready is not None:
                self.inline = self._step.warm_up(lambda: not self._queue.stopped) and self._may_run_inline
            if self._queue.stopped:  # Nobody waits any more.
                return
            check_device(self._step)
        except Exception as error:
            self._end("the network failed while it was warmed up", error)
            return
        if self._on_ready is not None:
            self._on_ready()
        try:
            while not self.inline and (not self._queue.stopped or self._launched):
                self._advance()
        except Exception as error:
            self._end("the compute device failed", error)

    def _advance(self) -> None:
        """Launch the next batch, wait a moment for the running one, or finish the oldest."""
        step, launched = self._step, self._launched
        if len(launched) < step.slots:
            batch = self._queue.take(block=not launched, full=bool(launched))
            if batch is not None:
                self._launch(batch)
        if not launched:
            return
        if len(launched) < step.slots and not step.done(launched[0].slot):
            # Polled and not waited for, so that a batch that fills up meanwhile is launched behind the running one.
            time.sleep(_POLL_S)
            return
        self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Fetch the oldest batch and hand out its results; with two slots, launch the next batch in between."""
        step, launched = self._step, self._launched
        oldest = launched.popleft()
        try:
            packed = step.fetch(oldest.slot, oldest.batch.size)
        except Exception as error:
            self._recover(oldest.batch, error)
            return
        seconds = time.perf_counter() - oldest.started
        following = self._queue.take(block=False) if step.slots > 1 and not launched else None
        # Launched before the results are handed out, or the device would idle meanwhile.  But a batch of explanations
        # is computed on this thread, and would delay these results.
        if following is not None and following.mode is RequestMode.PREDICT:
            self._launch(following)
            following = None
        self._complete(oldest.batch, Result(packed), seconds)
        if following is not None:
            self._launch(following)

    def _launch(self, batch: DeviceBatch) -> None:
        started = time.perf_counter()
        slot = self._next_slot
        self._step.is_alone = batch.is_alone
        try:
            if batch.mode is not RequestMode.PREDICT:
                result = run_batch(self._step, batch)
            else:
                self._next_slot = (slot + 1) % self._step.slots
                batch.copy_images(self._step.input(slot))
                self._step.launch(slot, batch.size)
                self._launched.append(_Launched(batch, slot, started))
                return
        except Exception as error:
            self._recover(batch, error)
            return
        self._complete(batch, result, time.perf_counter() - started)

    def _complete(self, batch: DeviceBatch, result: Result, seconds: float | None = None) -> None:
        """Hand out the results of a batch; its time, if it ran without failing, is recorded before."""
        if seconds is not None:
            # Each request counts once, by its first slice.
            waits = [batch.taken_at - each.request.queued_at for each in batch.slices if each.start == 0]
            self._recorder.batch(batch.size, seconds, waits)
        with self._queue as batcher:
            batcher.complete(batch, result, now=time.monotonic())

    def _recover(self, batch: DeviceBatch, error: Exception) -> None:
        """Run a failed batch again in halves; raises only if the device is dead."""
        # Halves run in slot 0, which another launched batch may still use: all are fetched first.
        while self._launched:
            other = self._launched.popleft()
            try:
                packed = self._step.fetch(other.slot, other.batch.size)
            except Exception as next_error:
                self._run_halves(other.batch, next_error)
            else:
                self._complete(other.batch, Result(packed))
        self._run_halves(batch, error)

    def _run_halves(self, batch: DeviceBatch, error: Exception) -> None:
        if is_out_of_memory(error):
            device_logger.warning("out of device memory with %d images; trying halves", batch.size)
            self._step.release_memory()
        else:
            device_logger.exception("a batch of %d images failed", batch.size, exc_info=error)
            check_device(self._step)
        if batch.size == 1:
            alone = batch.slices[0]
            failure: Exception = InferenceFailed(alone.start, "the network failed on this image; it was logged")
            if is_out_of_memory(error):
                failure = DeviceError("the device has no memory for one image; try again")
            with self._queue as batcher:
                batcher.finish(alone.request, failure)
            return
        for half in batch.halves():
            alive = half.alive()
            if not alive.size:
                continue
            try:
                result = run_batch(self._step, alive)
            except Exception as next_error:
                self._run_halves(alive, next_error)
            else:
                self._complete(alive, result)

    def _end(self, message: str, error: Exception) -> None:
        device_logger.critical("%s", message, exc_info=error)
        self._launched.clear()
        failure = DeviceError(f"{message}; this process is being replaced, try again")
        # First, so that a client that learns of the failure finds the service not ready.
        self._on_failed(error)
        with self._queue as batcher:
            batcher.close(message)
            batcher.fail_all(failure)


def check_device(step: Step) -> None:
    """Check the device by running one blank image."""
    try:
        step.input(0)[:1] = 0
        step.launch(0, 1)
        packed = step.fetch(0, 1)
    except Exception as error:
        if is_out_of_memory(error):  # Having no memory for now does not mean that the device is dead.
            step.release_memory()
            return
        raise DeviceError(f"a blank image failed on the device ({type(error).__name__})") from error
    if not np.isfinite(packed).all():
        raise DeviceError("a blank image gave outputs that are not finite")
