"""The device worker: takes batches from the queue, runs them, and hands every request its result.

Between two batches the thread does only what cannot wait: copy images into the step's buffer, launch, hand out.
With a step of two slots a full batch is launched behind the one that is running; a batch that is not full waits until
the device is free, so that it can still grow.

*Failures.*  Out of memory: the batch is run again in halves.  After any other error a blank image is tried; if that
works, the batch is run again in halves until the image on which the network fails is alone, and only its request
fails.  If it does not, the device is dead: every live request fails, and ``on_failure`` is told, once, so that the
process can be replaced.

A quick step (:attr:`app.inference.steps.base.Step.quick`) needs no thread: the thread warms it up and ends.
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
from app.inference.queue import Batcher, DeviceBatch, Images, Part, RequestQueue, Result, State
from app.inference.steps.base import Step, is_out_of_memory
from psc_core.errors import DeviceError

logger = logging.getLogger("psc.device")

PREDICT: Final = "predict"
EXPLAIN: Final = "explain"
"""Kinds of requests: outputs alone, or with explanations."""

_POLL_S: Final = 50e-6


class _Launched(NamedTuple):
    """A batch that the device is working on."""

    batch: DeviceBatch
    slot: int
    started: float


class DeviceWorker:
    """Owns the step.

    Args:
        queue: Where batches come from; stopping it ends the thread.
        step: How they are computed.
        on_ready: Called on the thread once every shape is warm.
        on_failure: Called when the device is dead.
        on_batch: Told of each batch and the seconds its computation took.
        name: Of the thread.
        may_run_inline: Whether a quick step may run where :meth:`run_due` is called.

    Attributes:
        inline: Whether, once ready, batches are computed by :meth:`run_due` instead of the thread.
    """

    def __init__(
        self,
        queue: RequestQueue,
        step: Step,
        *,
        on_ready: Callable[[], None],
        on_failure: Callable[[Exception], None],
        on_batch: Callable[[DeviceBatch, float], None],
        name: str,
        may_run_inline: bool = False,
    ) -> None:
        self._queue = queue
        self._step = step
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._on_batch = on_batch
        self._launched: deque[_Launched] = deque()
        self._next_slot = 0
        self._may_run_inline = may_run_inline
        self.inline = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Warm up, then serve until the queue is stopped."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has been started and has not ended."""
        return self._thread.is_alive()

    def run_due(self) -> None:
        """Compute, on the calling thread, every batch that is due; only when :attr:`inline`."""
        try:
            while (batch := self._queue.take(block=False)) is not None:
                self._launch(batch)
                if self._launched:
                    self._finish_oldest()
        except Exception as error:
            self._device_failed("the compute device failed", error)

    def _run(self) -> None:
        try:
            self._step.warm_up()
            self._check_device()
        except Exception as error:
            self._device_failed("the network failed while it was warmed up", error)
            return
        self.inline = self._may_run_inline and self._step.quick
        self._on_ready()
        try:
            while not self.inline and (not self._queue.stopped or self._launched):
                self._advance()
        except Exception as error:
            self._device_failed("the compute device failed", error)

    def _advance(self) -> None:
        """Launch a batch, wait a moment, or finish the oldest one."""
        step, launched = self._step, self._launched
        if len(launched) < step.slots:
            batch = self._queue.take(block=not launched, full=bool(launched))
            if batch is not None:
                self._launch(batch)
        if not launched:
            return
        if len(launched) < step.slots and not step.done(launched[0].slot):
            time.sleep(_POLL_S)
            return
        self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Fetch the oldest batch and hand its results out; with two slots, launch the next batch in between."""
        step, launched = self._step, self._launched
        oldest = launched.popleft()
        try:
            packed = step.fetch(oldest.slot, oldest.batch.size)
        except Exception as error:
            self._recover(oldest.batch, error)
            return
        seconds = time.perf_counter() - oldest.started
        if step.slots > 1 and not launched:
            batch = self._queue.take(block=False)
            if batch is not None:
                self._launch(batch)
        self._on_batch(oldest.batch, seconds)
        self._hand_out(oldest.batch, Result(packed))

    def _launch(self, batch: DeviceBatch) -> None:
        started = time.perf_counter()
        slot = self._next_slot
        try:
            if batch.kind == EXPLAIN:
                result = self._explain(batch)
            else:
                self._next_slot = (slot + 1) % self._step.slots
                _gather(batch.parts, self._step.input(slot))
                self._step.launch(slot, batch.size)
                self._launched.append(_Launched(batch, slot, started))
                return
        except Exception as error:
            self._recover(batch, error)
            return
        self._on_batch(batch, time.perf_counter() - started)
        self._hand_out(batch, result)

    def _explain(self, batch: DeviceBatch) -> Result:
        images = np.empty((batch.size, *self._step.input(0).shape[1:]), np.uint8)
        _gather(batch.parts, images)
        return self._step.explain(images)

    def _hand_out(self, batch: DeviceBatch, result: Result) -> None:
        """Give each request its part of a batch's result; a request with outputs that are not finite fails."""
        finite = np.asarray(np.isfinite(result.packed).all(axis=1))
        failures: list[tuple[Part, int]] = []
        offset = 0
        for part in batch.parts:
            request, size = part.request, part.stop - part.start
            computed = result[offset : offset + size]
            if not finite[offset : offset + size].all():
                failures.append((part, part.start + int(np.argmin(finite[offset : offset + size]))))
            if size == request.count:
                request.result = computed
            else:
                if len(request.result.packed) != request.count:
                    request.result = Result.empty(request.count, computed)
                request.result.copy_from(computed, slice(part.start, part.stop))
            offset += size

        def complete(batcher: Batcher, now: float) -> None:
            for part, index in failures:
                batcher.fail(part.request, InferenceFailed(f"image {index}: the network's outputs are not finite"))
            batcher.complete(batch, now=now)

        self._queue.call(complete)

    def _recover(self, batch: DeviceBatch, error: Exception) -> None:
        """Run a failed batch again in halves; raises only when the device is dead."""
        while self._launched:
            other = self._launched.popleft()
            try:
                packed = self._step.fetch(other.slot, other.batch.size)
            except Exception as next_error:
                self._halve(other.batch, next_error)
            else:
                self._hand_out(other.batch, Result(packed))
        self._halve(batch, error)

    def _halve(self, batch: DeviceBatch, error: Exception) -> None:
        if is_out_of_memory(error):
            logger.warning("out of device memory with %d images; trying halves", batch.size)
            self._step.release_memory()
        else:
            logger.exception("a batch of %d images failed", batch.size, exc_info=error)
            self._check_device()
        if batch.size == 1:
            part = batch.parts[0]
            failure: Exception = InferenceFailed(f"image {part.start}: the network failed on this image; it was logged")
            if is_out_of_memory(error):
                failure = DeviceError("the device has no memory for one image; try again")
            self._queue.call(lambda batcher, now: batcher.fail(part.request, failure))
            return
        for half in _halves(batch):
            self._run_again(half)

    def _run_again(self, batch: DeviceBatch) -> None:
        alive = [part for part in batch.parts if part.request.state is not State.FINISHED]
        if not alive:
            return
        size = sum(part.stop - part.start for part in alive)
        batch = DeviceBatch(batch.kind, alive, size, batch.taken_at)
        try:
            if batch.kind == EXPLAIN:
                result = self._explain(batch)
            else:
                _gather(alive, self._step.input(0))
                self._step.launch(0, size)
                result = Result(self._step.fetch(0, size))
        except Exception as error:
            self._halve(batch, error)
            return
        self._hand_out(batch, result)

    def _check_device(self) -> None:
        """Send one blank image through the device; raises when the device is dead."""
        try:
            self._step.input(0)[:1] = 0
            self._step.launch(0, 1)
            packed = self._step.fetch(0, 1)
        except Exception as error:
            if is_out_of_memory(error):
                self._step.release_memory()
                return
            raise DeviceError(f"a blank image failed on the device ({type(error).__name__})") from error
        if not np.isfinite(packed).all():
            raise DeviceError("a blank image gave outputs that are not finite")

    def _device_failed(self, what: str, error: Exception) -> None:
        logger.critical("%s", what, exc_info=error)
        self._launched.clear()
        failure = DeviceError(f"{what}; this process is being replaced, try again")

        def end(batcher: Batcher, _now: float) -> None:
            batcher.close(what)
            batcher.fail_all(failure)

        self._on_failure(error)  # First: whoever is told of the failure finds the service not ready.
        self._queue.call(end)


def _gather(parts: list[Part], buffer: Images) -> None:
    """Copy the images of the parts, in order, to the front of ``buffer``."""
    offset = 0
    for part in parts:
        size = part.stop - part.start
        buffer[offset : offset + size] = part.request.images[part.start : part.stop]
        offset += size


def _halves(batch: DeviceBatch) -> tuple[DeviceBatch, DeviceBatch]:
    """The batch cut after half of its images, through a part where need be."""
    half = room = batch.size // 2
    left: list[Part] = []
    right: list[Part] = []
    for part in batch.parts:
        cut = min(part.stop, part.start + room)
        if cut > part.start:
            left.append(Part(part.request, part.start, cut))
        if cut < part.stop:
            right.append(Part(part.request, cut, part.stop))
        room -= cut - part.start
    return (
        DeviceBatch(batch.kind, left, half, batch.taken_at),
        DeviceBatch(batch.kind, right, batch.size - half, batch.taken_at),
    )
