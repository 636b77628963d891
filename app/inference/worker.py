"""Take batches from the queue, run them on the device, and hand every request its result.

Between two batches the thread does only what cannot wait: it copies images into the step's buffer, launches the batch
and hands out results.  With a step of two slots, a full batch is launched behind the running one; a batch that is not
full waits until the device is free, so that it can still grow.

A quick step (:meth:`app.inference.steps.Step.warm_up`) needs no thread: the thread warms it up and ends.

A batch that failed runs again in halves: at once if the device is out of memory, after any other error only if a blank
image still runs.  In the end the image at fault is alone, and only its request fails.  If the blank image fails too,
the device is dead, which ends every request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from app.errors import InferenceFailed
from app.inference.batcher import DeviceBatch, RequestMode, RequestQueue, Result
from app.inference.steps import Step, is_out_of_memory, run_batch
from app.metrics import ModelRecorder
from psc_core.errors import DeviceError

logger = logging.getLogger("psc.device")

_POLL_S: Final = 50e-6  # the time between two looks at a running batch, seconds; short compared with that of a batch


class _Launched(NamedTuple):
    """A batch that the device is working on."""

    batch: DeviceBatch
    slot: int
    started: float


class DeviceWorker:
    """The owner of the step, and the thread on which it runs until the queue is stopped."""

    def __init__(
        self,
        queue: RequestQueue,
        step: Step,
        recorder: ModelRecorder,
        *,
        name: str,
        may_run_inline: bool = False,
        on_ready: Callable[[], None] | None = None,
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
            logger.warning("out of device memory with %d images; trying halves", batch.size)
            self._step.release_memory()
        else:
            logger.exception("a batch of %d images failed", batch.size, exc_info=error)
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
        logger.critical("%s", message, exc_info=error)
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
