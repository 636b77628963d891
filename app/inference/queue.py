"""Which images run next: a state machine with an explicit clock, and a thread-safe queue around it.

The life of a :class:`QueuedRequest` of ``count`` images::

    reserve ─▶ RESERVED ─put─▶ QUEUED ─take─▶ (its last image taken) RUNNING ─complete─▶ FINISHED
                  │               │                                     │
                  └──── cancel, expire, fail: FINISHED with an error ───┘

*Bounded.*  ``pending`` = images reserved or queued ≤ ``max_queue_images``; beyond it a request is refused with
:class:`QueueFull` and a ``retry_after`` from the measured times of batches.  So is a request whose turn would come,
by those times, after a third of the time to its deadline; the rest is for its own images and for a device that slows
down.  Admitted work is therefore done in time, and an overload leaves no long queue behind.  Times are kept by batch
size, because batches of one image say little about what 64 take.

*Fair.*  Queued requests stand in a ring; a turn is at most ``quantum`` images (an eighth of a batch), after which a
request with more images goes to the end of the ring.  A large request fills batches that nobody else needs, and a
single image waits for one turn of each request before it, not for all of their images.  A request that has waited a
third of the time to its deadline is urgent and keeps its turn until all of its images are taken.

*Eager.*  A batch leaves as soon as the device asks for one; with ``max_delay_s`` > 0 it waits until it is full or its
oldest request has waited that long.

*Certain.*  Every request reaches FINISHED exactly once and is handed out exactly once by :meth:`Batcher.collect`.

Requests of different *kinds* (another computation of the same model) never share a batch; kinds take turns.
No torch and no HTTP in this module.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from app.errors import ClientGone, DeadlineExceeded, NotReady, QueueFull
from psc_core.prediction import SCORES

Images = npt.NDArray[np.uint8]
"""(n, channels, height, width)."""

_MAX_RETRY_AFTER_S: Final = 60
_TIME_SMOOTHING: Final = 0.2
"""Weight of the newest batch time in the running mean for its size."""

_WAIT_FRACTION: Final = 1 / 3
"""Fraction of the time to the deadline that a request may spend waiting for its turn."""


class State(enum.Enum):
    """Where a request is in its life."""

    RESERVED = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Result:
    """What the device computed for a request's images.

    Attributes:
        packed: ``float32 (n, S + K)`` outputs (:mod:`psc_core.model.outputs`).
        explanation: By name, arrays of ``Pipeline.explain``, images first; empty unless asked for.
    """

    packed: npt.NDArray[np.float32]
    explanation: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def empty(cls, count: int, like: Result) -> Result:
        """Room for the results of ``count`` images that several batches compute."""
        return cls(_room(count, like.packed), {name: _room(count, array) for name, array in like.explanation.items()})

    def __getitem__(self, images: slice) -> Result:
        """A view of some of the images."""
        return Result(self.packed[images], {name: array[images] for name, array in self.explanation.items()})

    def copy_from(self, other: Result, images: slice) -> None:
        """Set the results of ``images``."""
        self.packed[images] = other.packed
        for name, array in other.explanation.items():
            self.explanation[name][images] = array


def _room(count: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.empty((count, *like.shape[1:]), like.dtype)


_NO_RESULT: Final = Result(np.empty((0, len(SCORES)), np.float32))


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request's images on their way through the device."""

    count: int
    deadline: float
    """When the result must be there, seconds of the batcher's clock."""
    urgent_at: float
    """From this time on it keeps its turn until all of its images are taken."""
    kind: str
    """Requests of one kind may share a batch."""
    waiter: Any
    """Whoever waits for the result; never looked at here."""
    images: Images = field(init=False)
    """Set before it is queued."""
    state: State = State.RESERVED
    n_taken: int = 0
    """Images handed out in batches so far."""
    n_done: int = 0
    queued_at: float = 0.0
    result: Result = _NO_RESULT
    """Of the images completed so far."""
    error: Exception | None = None
    """Why it failed; ``None`` after FINISHED means success."""


class Part(NamedTuple):
    """Images ``start … stop - 1`` of a request."""

    request: QueuedRequest
    start: int
    stop: int


class DeviceBatch(NamedTuple):
    """Parts of requests of one kind, in the order of their outputs; ``size`` images in all."""

    kind: str
    parts: list[Part]
    size: int
    taken_at: float


class _Ring:
    """The queued requests of one kind.

    Attributes:
        requests: In the order of their next turns.
        n_images: Images of them that are not yet taken.
        n_begun: Requests that have had a turn.
    """

    __slots__ = ("n_begun", "n_images", "requests")

    def __init__(self) -> None:
        self.requests: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.n_images = 0
        self.n_begun = 0

    def due_in(self, now: float, max_batch: int, max_delay: float, full: bool) -> float | None:
        if not self.requests or (full and self.n_images < max_batch):
            return None
        if self.n_images >= max_batch or self.n_begun:
            return 0.0
        return max(0.0, next(iter(self.requests)).queued_at + max_delay - now)


class Batcher:
    """The state machine; every method that depends on time takes ``now`` (seconds, any origin).

    Args:
        max_batch_size: Maximum number of images in a batch.
        max_queue_images: Maximum number of images reserved or queued.
        max_delay_s: How long a batch may wait to fill; 0 sends it at once.
    """

    def __init__(self, *, max_batch_size: int, max_queue_images: int, max_delay_s: float = 0.0) -> None:
        self.max_batch = max_batch_size
        self._max_queue = max_queue_images
        self.max_delay_s = max_delay_s
        self._quantum = max(1, max_batch_size // 8)
        self._rings: dict[str, _Ring] = {}
        self._live: OrderedDict[QueuedRequest, None] = OrderedDict()
        self._finished: list[QueuedRequest] = []
        self._pending = 0
        self._closed = ""
        self._batch_seconds: list[float | None] = [None] * (_size_class(max_batch_size) + 1)
        self._last_completed = -math.inf

    @property
    def pending(self) -> int:
        """Images reserved or queued."""
        return self._pending

    @property
    def idle(self) -> bool:
        """Whether no request is alive."""
        return not self._live

    def drain_seconds(self, images: int) -> float:
        """Least time that so many images take, by the batches measured so far; 0 before the first.

        A batch larger than any measured counts as the largest measured.
        """
        full, rest = divmod(images, self.max_batch)
        return full * self._seconds_of(self.max_batch) + (self._seconds_of(rest) if rest else 0.0)

    def check(self, count: int, *, now: float, deadline: float) -> None:
        """Refuse a request that :meth:`reserve` would refuse, before its body is read.

        Raises:
            QueueFull: No room, or too little time to ``deadline`` at the present rate.
            NotReady: Closed.
        """
        if self._closed:
            raise NotReady(self._closed)
        if self._pending + count > self._max_queue:
            raise QueueFull(
                f"the queue has no room for {count} images ({self._pending} of {self._max_queue} places are taken); "
                f"try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )
        first_turn = len(self._live) * self._quantum if count <= self._quantum else self._pending
        before = min(self._pending, first_turn)  # A small request is done after its first turn.
        longest, wait = _WAIT_FRACTION * (deadline - now), self.drain_seconds(before)
        if wait > longest:
            raise QueueFull(
                f"the {before} images before this request take about {wait:.3g} s, more than the {longest:.3g} s that "
                f"it can wait; try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )

    def reserve(self, count: int, *, now: float, deadline: float, kind: str = "", waiter: Any = None) -> QueuedRequest:
        """Admit a request before its images are decoded.

        Raises:
            QueueFull: No room, or too little time to ``deadline`` at the present rate.
            NotReady: Closed.
        """
        self.check(count, now=now, deadline=deadline)
        request = QueuedRequest(count, deadline, now + _WAIT_FRACTION * (deadline - now), kind, waiter)
        self._live[request] = None
        self._pending += count
        return request

    def put(self, request: QueuedRequest, *, now: float) -> bool:
        """Queue a reserved request; ``False`` when it has finished already (cancelled, expired)."""
        if request.state is not State.RESERVED:
            return False
        request.state = State.QUEUED
        request.queued_at = now
        ring = self._rings.setdefault(request.kind, _Ring())
        ring.requests[request] = None
        ring.n_images += request.count
        return True

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request that nobody waits for; results of it that the device still computes are ignored."""
        self._finish(request, ClientGone("the client closed the connection"))

    def fail(self, request: QueuedRequest, error: Exception) -> None:
        """End one request with an error."""
        self._finish(request, error)

    def fail_all(self, error: Exception) -> None:
        """End every live request with ``error``."""
        for request in list(self._live):
            self._finish(request, error)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        for request in [request for request in self._live if request.deadline <= now]:
            self._expire(request)

    def close(self, reason: str) -> None:
        """Admit nothing more; what was admitted still runs."""
        self._closed = reason

    def due_in(self, now: float, *, full: bool = False) -> float | None:
        """Seconds until :meth:`take` would give a batch: 0 now, ``None`` not before something is put."""
        waits = [ring.due_in(now, self.max_batch, self.max_delay_s, full) for ring in self._rings.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def take(self, now: float, *, full: bool = False) -> DeviceBatch | None:
        """The next batch, or ``None`` if none is due.

        Args:
            now: The time.
            full: Only a batch of ``max_batch_size``, whatever the delay.
        """
        for kind, ring in list(self._rings.items()):
            while ring.due_in(now, self.max_batch, self.max_delay_s, full) == 0:
                batch = self._fill(kind, ring, now)
                if batch is not None:
                    self._rings[kind] = self._rings.pop(kind)
                    return batch
        return None

    def complete(self, batch: DeviceBatch, *, now: float) -> None:
        """Count the images of a batch as done; requests whose images are all done are finished."""
        self._measure(batch, now)
        for part in batch.parts:
            request = part.request
            request.n_done += part.stop - part.start
            if request.n_done == request.count:
                self._finish(request, None)

    def collect(self) -> list[QueuedRequest]:
        """Requests finished since the last call, each exactly once."""
        finished, self._finished = self._finished, []
        return finished

    def retry_after(self) -> int:
        """Whole seconds in which the present queue drains, 1 to 60."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self.drain_seconds(self._pending))))

    def _fill(self, kind: str, ring: _Ring, now: float) -> DeviceBatch | None:
        parts: list[Part] = []
        room = self.max_batch
        while room and ring.requests:
            request = next(iter(ring.requests))
            if request.deadline <= now:
                self._expire(request)
                continue
            keeps_turn = len(ring.requests) == 1 or request.urgent_at <= now
            turn = room if keeps_turn else min(room, self._quantum)
            start, stop = request.n_taken, min(request.count, request.n_taken + turn)
            parts.append(Part(request, start, stop))
            ring.n_begun += (stop < request.count) - (start > 0)
            request.n_taken = stop
            room -= stop - start
            self._pending -= stop - start
            ring.n_images -= stop - start
            if stop == request.count:
                request.state = State.RUNNING
                del ring.requests[request]
            elif not keeps_turn:
                ring.requests.move_to_end(request)
        return DeviceBatch(kind, parts, self.max_batch - room, now) if parts else None

    def _expire(self, request: QueuedRequest) -> None:
        seconds = (request.deadline - request.urgent_at) / (1 - _WAIT_FRACTION)
        self._finish(request, DeadlineExceeded(f"deadline exceeded after {seconds:.3g} s; try again"))

    def _finish(self, request: QueuedRequest, error: Exception | None) -> None:
        if request.state is State.FINISHED:
            return
        if request.state is State.QUEUED:
            ring = self._rings[request.kind]
            del ring.requests[request]
            ring.n_images -= request.count - request.n_taken
            ring.n_begun -= request.n_taken > 0
        self._pending -= request.count - request.n_taken
        request.state = State.FINISHED
        request.error = error
        del self._live[request]
        self._finished.append(request)

    def _measure(self, batch: DeviceBatch, now: float) -> None:
        seconds = max(now - max(batch.taken_at, self._last_completed), 1e-9)
        size = _size_class(batch.size)
        mean = self._batch_seconds[size]
        self._batch_seconds[size] = seconds if mean is None else mean + _TIME_SMOOTHING * (seconds - mean)
        self._last_completed = now

    def _seconds_of(self, size: int) -> float:
        """Time of a batch: measured at about this size, else its fraction of a larger one, else as the largest."""
        smallest = _size_class(size)
        for larger in range(smallest, len(self._batch_seconds)):
            seconds = self._batch_seconds[larger]
            if seconds is not None:
                return seconds if larger == smallest else seconds * size / min(1 << larger, self.max_batch)
        return next((seconds for seconds in reversed(self._batch_seconds) if seconds is not None), 0.0)


def _size_class(size: int) -> int:
    """Sizes of 1, 2, 3–4, 5–8, … images count as alike."""
    return (size - 1).bit_length()


class RequestQueue:
    """A :class:`Batcher` shared by the event loop (reserve, put, cancel) and the device thread (take, complete).

    Args:
        batcher: The state machine; nobody else may touch it.
        deliver: Called without the lock, on whichever thread caused it, with the requests just finished.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        batcher: Batcher,
        deliver: Callable[[list[QueuedRequest]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher = batcher
        self._deliver = deliver
        self.clock = clock
        self._condition = threading.Condition(threading.Lock())
        self._stopped = False

    @property
    def pending(self) -> int:
        """Images reserved or queued."""
        return self._batcher.pending

    @property
    def idle(self) -> bool:
        """Whether no request is alive."""
        return self._batcher.idle

    def check(self, count: int, *, deadline_s: float) -> None:
        """See :meth:`Batcher.check`; the deadline is ``deadline_s`` seconds from now."""
        now = self.clock()
        with self._condition:
            self._batcher.check(count, now=now, deadline=now + deadline_s)

    def reserve(self, count: int, *, deadline_s: float, kind: str, waiter: Any) -> QueuedRequest:
        """See :meth:`Batcher.reserve`; the deadline is ``deadline_s`` seconds from now."""
        now = self.clock()
        with self._condition:
            return self._batcher.reserve(count, now=now, deadline=now + deadline_s, kind=kind, waiter=waiter)

    def put(self, requests: list[QueuedRequest]) -> None:
        """Queue reserved requests and wake the device thread once."""
        now = self.clock()
        with self._condition:
            for request in requests:
                self._batcher.put(request, now=now)
            self._condition.notify()

    def take(self, *, block: bool, full: bool = False) -> DeviceBatch | None:
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

    def _hand_over(self, finished: list[QueuedRequest]) -> None:
        if finished:
            self._deliver(finished)
