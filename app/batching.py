"""Which images run next: a pure state machine with an explicit clock, and a thread-safe shell around it.

One :class:`Job` is one request of ``count`` images.  Its life::

    reserve ─▶ RESERVED ─put─▶ WAITING ─take─▶ (its last image taken) RUNNING ─complete─▶ FINISHED
                  │                │                                     │
                  └──── cancel, expire, fail: FINISHED with an error ────┘

*Bounded.*  ``pending`` = images reserved or waiting ≤ ``max_queue_images``; one request more is
:class:`QueueFull`, with ``retry_after`` from the measured times of batches.  So is a request whose turn would come,
by those times, after a third of the time to its deadline: the rest is for its own images and for a device that
slows down.  Admitted work is therefore done in time, and what an overload leaves behind is gone soon after it.
Times are kept by size, because a quiet service runs batches of one image, which tell little of what 64 take.

*Fair.*  Waiting jobs stand in a ring; a turn is at most ``quantum`` images (an eighth of a batch), after
which a job that has more goes to the end of the ring.  So a large request fills batches that nobody else
wants, and a single image waits for one turn of each job before it, not for all of their images.  A job that
has waited a third of the time to its deadline keeps its turn until it is through: under a lasting overload
turns of an eighth would not end in time.

*Eager.*  A batch leaves as soon as somebody asks for one; with ``max_delay_s`` > 0 it waits until it is full
or its oldest image has waited that long.

*Certain.*  Every job reaches FINISHED exactly once and is handed out exactly once by :meth:`Batcher.collect`.

Jobs of different *lanes* never share a batch (another computation for the same model); lanes take turns.
No torch and no HTTP in here.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from app.errors import ClientGone, DeadlineExceeded, NotReady, QueueFull

_MAX_RETRY_AFTER_S: Final = 60
_NEWEST: Final = 0.2
"""Weight of a batch's time against those of earlier batches of about its size."""

_WAITING_SHARE: Final = 1 / 3


class State(enum.Enum):
    """Where a job is in its life."""

    RESERVED = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Job:
    """One request's images on their way through the device.

    Attributes:
        count: Images.
        deadline: Time by which the answer must be there, seconds of the batcher's clock.
        patience: Time from which its turn lasts until it is through.
        lane: Jobs of one lane may share a batch.
        payload: Whatever the engine needs; the batcher never looks at it.
        state: Where it is.
        taken: Images handed out in batches so far.
        done: Images completed so far.
        waiting_since: When it was put.
        error: Why it failed; ``None`` after FINISHED means success.
    """

    __slots__ = (
        "count", "deadline", "done", "error", "lane", "patience", "payload", "state", "taken", "waiting_since",
    )  # fmt: skip

    def __init__(self, count: int, deadline: float, patience: float, lane: str, payload: Any) -> None:
        self.count = count
        self.deadline = deadline
        self.patience = patience
        self.lane = lane
        self.payload = payload
        self.state = State.RESERVED
        self.taken = 0
        self.done = 0
        self.waiting_since = 0.0
        self.error: Exception | None = None


class Slice(NamedTuple):
    """Images ``start … stop - 1`` of ``job``."""

    job: Job
    start: int
    stop: int


class Batch(NamedTuple):
    """Slices in the order of their rows, ``size`` images in all."""

    lane: str
    slices: list[Slice]
    size: int
    taken_at: float


class _Lane:
    """The waiting jobs of one lane.

    Attributes:
        ring: In the order of their next turns.
        images: Images of them not yet taken.
        begun: How many of them have had a turn.
    """

    __slots__ = ("begun", "images", "ring")

    def __init__(self) -> None:
        self.ring: OrderedDict[Job, None] = OrderedDict()
        self.images = 0
        self.begun = 0

    def due_in(self, now: float, max_batch: int, max_delay: float, full: bool) -> float | None:
        if not self.ring or (full and self.images < max_batch):
            return None
        if self.images >= max_batch or self.begun:
            return 0.0
        return max(0.0, next(iter(self.ring)).waiting_since + max_delay - now)


class Batcher:
    """The state machine; every method that depends on time takes ``now`` (seconds, any origin).

    Args:
        max_batch_size: Most images in a batch.
        max_queue_images: Most images reserved or waiting.
        max_delay_s: How long a batch may wait to fill; 0 sends it at once.
    """

    def __init__(self, *, max_batch_size: int, max_queue_images: int, max_delay_s: float = 0.0) -> None:
        if max_batch_size < 1 or max_queue_images < 1 or max_delay_s < 0:
            raise ValueError(
                "expected positive sizes and a delay of 0 or more, got "
                f"{max_batch_size=}, {max_queue_images=}, {max_delay_s=}"
            )
        self._max_batch = max_batch_size
        self._max_queue = max_queue_images
        self._max_delay = max_delay_s
        self._quantum = max(1, max_batch_size // 8)
        self._lanes: dict[str, _Lane] = {}
        self._live: OrderedDict[Job, None] = OrderedDict()
        self._outbox: list[Job] = []
        self._pending = 0
        self._closed = ""
        self._batch_seconds: list[float | None] = [None] * (_size_class(max_batch_size) + 1)
        self._last_done = -math.inf

    @property
    def pending(self) -> int:
        """Images reserved or waiting."""
        return self._pending

    @property
    def idle(self) -> bool:
        """Whether no job is alive."""
        return not self._live

    def drain_seconds(self, images: int) -> float:
        """How long so many images take, at the least, by the batches measured so far; 0 before the first.

        A batch larger than any measured may be as quick as the largest measured; whether it is will be seen.
        """
        full, rest = divmod(images, self._max_batch)
        return full * self._seconds_of(self._max_batch) + (self._seconds_of(rest) if rest else 0.0)

    def check(self, count: int, *, now: float, deadline: float) -> None:
        """Refuse a request that :meth:`reserve` would refuse; it need not be read first.

        Raises:
            QueueFull: No room, or too little time to ``deadline`` at the present rate.
            NotReady: Closed.
        """
        if self._closed:
            raise NotReady(self._closed)
        if self._pending + count > self._max_queue:
            raise QueueFull(
                f"expected room for {count} images, {self._pending} of {self._max_queue} places are taken; "
                f"try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )
        first_turn = len(self._live) * self._quantum if count <= self._quantum else self._pending
        before = min(self._pending, first_turn)  # A small request is through with its first turn.
        longest, wait = _WAITING_SHARE * (deadline - now), self.drain_seconds(before)
        if wait > longest:
            raise QueueFull(
                f"expected a turn within {longest:.3g} s, the {before} images before this request take about "
                f"{wait:.3g} s; try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )

    def reserve(self, count: int, *, now: float, deadline: float, lane: str = "", payload: Any = None) -> Job:
        """Admit a request before its images are decoded.

        Raises:
            QueueFull: No room, or too little time to ``deadline`` at the present rate.
            NotReady: Closed.
            ValueError: ``count`` is not positive.
        """
        if count < 1:
            raise ValueError(f"expected a job of at least 1 image, got {count}")
        self.check(count, now=now, deadline=deadline)
        job = Job(count, deadline, now + _WAITING_SHARE * (deadline - now), lane, payload)
        self._live[job] = None
        self._pending += count
        return job

    def put(self, job: Job, *, now: float) -> bool:
        """Queue a reserved job; ``False`` when it is already finished (cancelled, expired)."""
        if job.state is not State.RESERVED:
            return False
        job.state = State.WAITING
        job.waiting_since = now
        lane = self._lanes.setdefault(job.lane, _Lane())
        lane.ring[job] = None
        lane.images += job.count
        return True

    def cancel(self, job: Job) -> None:
        """Drop a job nobody waits for any more; rows of it that are on the device are ignored later."""
        self._finish(job, ClientGone("the client closed the connection"))

    def fail(self, job: Job, error: Exception) -> None:
        """End one job with an error."""
        self._finish(job, error)

    def fail_all(self, error: Exception) -> None:
        """End every live job with ``error``."""
        for job in list(self._live):
            self._finish(job, error)

    def expire(self, now: float) -> None:
        """End the jobs whose deadline has passed, wherever they are."""
        for job in [job for job in self._live if job.deadline <= now]:
            self._expire(job)

    def close(self, reason: str) -> None:
        """Admit nothing more; what was admitted still runs."""
        self._closed = reason

    def due_in(self, now: float, *, full: bool = False) -> float | None:
        """Seconds until :meth:`take` would give a batch: 0 now, ``None`` not before something is put."""
        waits = [lane.due_in(now, self._max_batch, self._max_delay, full) for lane in self._lanes.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def take(self, now: float, *, full: bool = False) -> Batch | None:
        """The next batch, or ``None`` if none is due.

        Args:
            now: The time.
            full: Only a batch of ``max_batch_size``, whatever the delay.
        """
        for name, lane in list(self._lanes.items()):
            while lane.due_in(now, self._max_batch, self._max_delay, full) == 0:
                batch = self._fill(name, lane, now)
                if batch is not None:
                    self._lanes[name] = self._lanes.pop(name)
                    return batch
        return None

    def complete(self, batch: Batch, *, now: float) -> None:
        """Book a batch whose rows are written; the jobs that have all of theirs are finished."""
        self._measure(batch, now)
        for part in batch.slices:
            job = part.job
            job.done += part.stop - part.start
            if job.done == job.count:
                self._finish(job, None)

    def collect(self) -> list[Job]:
        """Jobs finished since the last call, each exactly once over the batcher's life."""
        finished, self._outbox = self._outbox, []
        return finished

    def retry_after(self) -> int:
        """Whole seconds in which the present queue drains, 1 to 60."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self.drain_seconds(self._pending))))

    def _fill(self, name: str, lane: _Lane, now: float) -> Batch | None:
        slices: list[Slice] = []
        room = self._max_batch
        while room and lane.ring:
            job = next(iter(lane.ring))
            if job.deadline <= now:
                self._expire(job)
                continue
            hurried = len(lane.ring) == 1 or job.patience <= now
            turn = room if hurried else min(room, self._quantum)
            start, stop = job.taken, min(job.count, job.taken + turn)
            slices.append(Slice(job, start, stop))
            lane.begun += (stop < job.count) - (start > 0)
            job.taken = stop
            room -= stop - start
            self._pending -= stop - start
            lane.images -= stop - start
            if stop == job.count:
                job.state = State.RUNNING
                del lane.ring[job]
            elif not hurried:
                lane.ring.move_to_end(job)
        return Batch(name, slices, self._max_batch - room, now) if slices else None

    def _expire(self, job: Job) -> None:
        self._finish(job, DeadlineExceeded("expected an answer before the deadline, there was none; retry"))

    def _finish(self, job: Job, error: Exception | None) -> None:
        if job.state is State.FINISHED:
            return
        if job.state is State.WAITING:
            lane = self._lanes[job.lane]
            del lane.ring[job]
            lane.images -= job.count - job.taken
            lane.begun -= job.taken > 0
        self._pending -= job.count - job.taken
        job.state = State.FINISHED
        job.error = error
        del self._live[job]
        self._outbox.append(job)

    def _measure(self, batch: Batch, now: float) -> None:
        seconds = max(now - max(batch.taken_at, self._last_done), 1e-9)
        kind = _size_class(batch.size)
        before = self._batch_seconds[kind]
        self._batch_seconds[kind] = seconds if before is None else before + _NEWEST * (seconds - before)
        self._last_done = now

    def _seconds_of(self, size: int) -> float:
        """Of a batch: measured at about this size, else its share of a larger one, else as the largest."""
        kind = _size_class(size)
        for larger in range(kind, len(self._batch_seconds)):
            seconds = self._batch_seconds[larger]
            if seconds is not None:
                return seconds if larger == kind else seconds * size / min(1 << larger, self._max_batch)
        return next((seconds for seconds in reversed(self._batch_seconds) if seconds is not None), 0.0)


def _size_class(size: int) -> int:
    """Sizes of 1, 2, 3–4, 5–8, … images count as alike."""
    return (size - 1).bit_length()


class BatchQueue:
    """:class:`Batcher` shared by the event loop (reserve, put, cancel) and the device thread (take, …).

    Args:
        batcher: The state machine; nobody else may touch it.
        deliver: Called without the lock, on whichever thread caused it, with the jobs just finished.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        batcher: Batcher,
        deliver: Callable[[list[Job]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher = batcher
        self._deliver = deliver
        self.clock = clock
        self._condition = threading.Condition(threading.Lock())
        self._stopped = False

    @property
    def pending(self) -> int:
        """Images reserved or waiting."""
        return self._batcher.pending

    @property
    def idle(self) -> bool:
        """Whether no job is alive."""
        return self._batcher.idle

    def check(self, count: int, *, deadline_s: float) -> None:
        """See :meth:`Batcher.check`; the deadline is ``deadline_s`` seconds from now."""
        now = self.clock()
        with self._condition:
            self._batcher.check(count, now=now, deadline=now + deadline_s)

    def reserve(self, count: int, *, deadline_s: float, lane: str, payload: Any) -> Job:
        """See :meth:`Batcher.reserve`; the deadline is ``deadline_s`` seconds from now."""
        now = self.clock()
        with self._condition:
            return self._batcher.reserve(count, now=now, deadline=now + deadline_s, lane=lane, payload=payload)

    def put(self, jobs: list[Job]) -> None:
        """Queue reserved jobs and wake the device thread once."""
        now = self.clock()
        with self._condition:
            for job in jobs:
                self._batcher.put(job, now=now)
            self._condition.notify()

    def take(self, *, block: bool, full: bool = False) -> Batch | None:
        """The next batch; waits for one when ``block``.  ``None``: none due, or stopped."""
        with self._condition:
            while True:
                now = self.clock()
                batch = self._batcher.take(now, full=full)
                finished = self._batcher.collect()
                if batch is not None or finished or not block or self._stopped:
                    break
                self._condition.wait(self._batcher.due_in(now))
        self._hand_over(finished)
        return batch

    def call(self, action: Callable[[Batcher, float], None]) -> None:
        """Run ``action(batcher, now)`` under the lock and deliver what it finished."""
        with self._condition:
            action(self._batcher, self.clock())
            finished = self._batcher.collect()
        self._hand_over(finished)

    def stop(self) -> None:
        """Make a blocked and every later :meth:`take` return."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopped

    def _hand_over(self, finished: list[Job]) -> None:
        if finished:
            self._deliver(finished)
