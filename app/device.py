"""The device thread: takes batches from the queue, runs them, writes every image's row where it belongs.

Between two batches the thread does only what cannot wait: copy bytes into the step's buffer, launch, book.
With a step of two slots a full batch is launched behind the one that is running; a batch that is not full
waits until the device is free, so that it can still grow.

Failures.  Out of memory: the batch is run again in halves.  Any other error: a blank image is tried; if
that works, the batch is run again in halves until the one image that the network fails on is alone, and
only its request fails.  If it does not, the device is dead: every live job fails, and ``on_failure`` is
told, once, so that the process can be replaced.

A quick step (:attr:`app.step.Step.quick`) needs no thread: it is warmed up on it, and the thread ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from app.batching import Batch, Batcher, BatchQueue, Slice, State
from app.errors import InferenceFailed
from app.step import Images, Step, is_out_of_memory
from psc_core.errors import DeviceError
from psc_core.model.decision import Rows

logger = logging.getLogger("psc.device")

EXPLAIN = "explain"
"""Lane of the jobs that want the explanation too."""

_POLL_S = 50e-6


class Block:
    """Rows that came from the device together.

    Attributes:
        rows: ``float32 (n, SCORES + K)``.
        made: What the reader made of all of them at once, for every request that has a part in them.
    """

    __slots__ = ("made", "rows")

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.made: Any = None


class Work:
    """What a job carries: decoded images in, rows out.

    Attributes:
        images: ``uint8 (n, C, H, W)``, complete when the job is put.
        block: Where the rows of the job's images are once it has finished well: its batch's own where one batch
            held them all.
        start: The first of them.
        explanation: Arrays of ``Pipeline.explain``, images first (lane :data:`EXPLAIN`).
        future: Where the answer is awaited; the engine's.
    """

    __slots__ = ("block", "explanation", "future", "images", "start")

    def __init__(self, future: Any) -> None:
        self.images: Images | None = None
        self.block: Block | None = None
        self.start = 0
        self.explanation: dict[str, npt.NDArray[Any]] = {}
        self.future = future


class _Flight(NamedTuple):
    batch: Batch
    slot: int
    started: float


class DeviceThread:
    """Owns the step; see the module.

    Attributes:
        inline: Whether, once ready, batches are computed by :meth:`run_due` instead of the thread.

    Args:
        queue: Where batches come from; stopping it ends the thread.
        step: How they are computed.
        on_ready: Called on the thread once every shape is warm.
        on_failure: Called on the thread when the device is dead.
        on_batch: Told of each batch and the seconds its computation took.
        inline: Whether a quick step may run where :meth:`run_due` is called.
    """

    def __init__(
        self,
        queue: BatchQueue,
        step: Step,
        *,
        on_ready: Callable[[], None],
        on_failure: Callable[[Exception], None],
        on_batch: Callable[[Batch, float], None],
        name: str,
        inline: bool = False,
    ) -> None:
        self._queue = queue
        self._step = step
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._on_batch = on_batch
        self._flights: deque[_Flight] = deque()
        self._slot = 0
        self._may_run_inline = inline
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
                if self._flights:
                    self._land()
        except Exception as error:
            self._die("the compute device failed", error)

    def _run(self) -> None:
        try:
            self._step.warm_up()
            self._probe()
        except Exception as error:
            self._die("the network failed while it was warmed up", error)
            return
        self.inline = self._may_run_inline and self._step.quick
        self._on_ready()
        try:
            while not self.inline and (not self._queue.stopped or self._flights):
                self._turn()
        except Exception as error:
            self._die("the compute device failed", error)

    def _turn(self) -> None:
        step, flights = self._step, self._flights
        if len(flights) < step.slots:
            batch = self._queue.take(block=not flights, full=bool(flights))
            if batch is not None:
                self._launch(batch)
        if not flights:
            return
        if len(flights) < step.slots and not step.done(flights[0].slot):
            time.sleep(_POLL_S)
            return
        self._land()

    def _land(self) -> None:
        """Fetch and book the oldest flight; with two slots, send the next batch before booking."""
        step, flights = self._step, self._flights
        flight = flights.popleft()
        try:
            rows = step.fetch(flight.slot, flight.batch.size)
        except Exception as error:
            self._recover(flight.batch, error)
            return
        seconds = time.perf_counter() - flight.started
        if step.slots > 1 and not flights:
            batch = self._queue.take(block=False)
            if batch is not None:
                self._launch(batch)
        self._on_batch(flight.batch, seconds)
        self._book(flight.batch, rows)

    def _launch(self, batch: Batch) -> None:
        started = time.perf_counter()
        if batch.lane == EXPLAIN:
            self._explain(batch, started)
            return
        slot = self._slot
        self._slot = (slot + 1) % self._step.slots
        try:
            _gather(batch.slices, self._step.input(slot))
            self._step.launch(slot, batch.size)
        except Exception as error:
            self._recover(batch, error)
            return
        self._flights.append(_Flight(batch, slot, started))

    def _explain(self, batch: Batch, started: float) -> None:
        images = np.empty((batch.size, *self._step.input(0).shape[1:]), np.uint8)
        _gather(batch.slices, images)
        try:
            rows, arrays = self._step.explain(images)
        except Exception as error:
            self._recover(batch, error)
            return
        self._on_batch(batch, time.perf_counter() - started)
        self._book(batch, rows, arrays)

    def _book(self, batch: Batch, rows: Rows, arrays: dict[str, npt.NDArray[Any]] | None = None) -> None:
        finite = bool(np.isfinite(rows).all())
        broken: list[tuple[Slice, int]] = []
        block = Block(rows)
        offset = 0
        for part in batch.slices:
            size = part.stop - part.start
            work: Work = part.job.payload
            if not finite:
                good = np.isfinite(rows[offset : offset + size]).all(axis=1)
                if not good.all():
                    broken.append((part, part.start + int(np.argmin(good))))
            if size == part.job.count:
                work.block, work.start = block, offset
            else:
                if work.block is None:
                    work.block = Block(np.empty((part.job.count, rows.shape[1]), np.float32))
                work.block.rows[part.start : part.stop] = rows[offset : offset + size]
            for name, array in (arrays or {}).items():
                whole = work.explanation.get(name)
                if whole is None:
                    whole = np.empty((part.job.count, *array.shape[1:]), array.dtype)
                    work.explanation[name] = whole
                whole[part.start : part.stop] = array[offset : offset + size]
            offset += size

        def book(batcher: Batcher, now: float) -> None:
            for part, index in broken:
                message = f"image {index}: the network's outputs are not finite; the image cannot be judged"
                batcher.fail(part.job, InferenceFailed(message))
            batcher.complete(batch, now=now)

        self._queue.call(book)

    def _recover(self, batch: Batch, error: Exception) -> None:
        """Run a failed batch again in halves; raises only when the device is dead."""
        while self._flights:
            flight = self._flights.popleft()
            try:
                rows = self._step.fetch(flight.slot, flight.batch.size)
            except Exception as next_error:
                self._halve(flight.batch, next_error)
            else:
                self._book(flight.batch, rows)
        self._halve(batch, error)

    def _halve(self, batch: Batch, error: Exception) -> None:
        if is_out_of_memory(error):
            logger.warning("out of device memory with %d images; trying halves", batch.size)
            self._step.release_memory()
        else:
            logger.exception("a batch of %d images failed", batch.size, exc_info=error)
            self._probe()
        if batch.size == 1:
            part = batch.slices[0]
            failure: Exception = InferenceFailed(f"image {part.start}: the network failed on this image; it was logged")
            if is_out_of_memory(error):
                failure = DeviceError("expected memory for one image on the device, there was none; retry")
            self._queue.call(lambda batcher, now: batcher.fail(part.job, failure))
            return
        for half in _halves(batch):
            self._again(half)

    def _again(self, batch: Batch) -> None:
        alive = [part for part in batch.slices if part.job.state is not State.FINISHED]
        if not alive:
            return
        size = sum(part.stop - part.start for part in alive)
        batch = Batch(batch.lane, alive, size, batch.taken_at)
        try:
            if batch.lane == EXPLAIN:
                images = np.empty((size, *self._step.input(0).shape[1:]), np.uint8)
                _gather(alive, images)
                self._book(batch, *self._step.explain(images))
            else:
                _gather(alive, self._step.input(0))
                self._step.launch(0, size)
                self._book(batch, self._step.fetch(0, size))
        except Exception as error:
            self._halve(batch, error)

    def _probe(self) -> None:
        """One blank image through the device; raises when the device is dead."""
        try:
            self._step.input(0)[:1] = 0
            self._step.launch(0, 1)
            rows = self._step.fetch(0, 1)
        except Exception as error:
            if is_out_of_memory(error):
                self._step.release_memory()
                return
            raise DeviceError(f"a blank image failed on the device ({type(error).__name__})") from error
        if not np.isfinite(rows).all():
            raise DeviceError("expected finite outputs for a blank image, got some that are not")

    def _die(self, what: str, error: Exception) -> None:
        logger.critical("%s", what, exc_info=error)
        self._flights.clear()
        failure = DeviceError(f"{what}; this process is being replaced, try again")

        def end(batcher: Batcher, _now: float) -> None:
            batcher.close(what)
            batcher.fail_all(failure)

        self._on_failure(error)  # First: who is told of the failure finds the service not ready.
        self._queue.call(end)


def _gather(slices: list[Slice], buffer: Images) -> None:
    """Copy the images of the slices, in order, to the front of ``buffer``."""
    offset = 0
    for part in slices:
        size = part.stop - part.start
        buffer[offset : offset + size] = part.job.payload.images[part.start : part.stop]
        offset += size


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    """The batch cut after half of its images, through a slice where need be."""
    left: list[Slice] = []
    right: list[Slice] = []
    room = batch.size // 2
    for part in batch.slices:
        cut = min(part.stop, part.start + room)
        if cut > part.start:
            left.append(Slice(part.job, part.start, cut))
        if cut < part.stop:
            right.append(Slice(part.job, cut, part.stop))
        room -= cut - part.start
    half = batch.size // 2
    return (
        Batch(batch.lane, left, half, batch.taken_at),
        Batch(batch.lane, right, batch.size - half, batch.taken_at),
    )
