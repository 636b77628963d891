"""Decide which images run next: a state machine with an explicit clock, and the queue that threads share.

The life of a :class:`QueuedRequest` with ``count`` images::

    reserve ─▶ RESERVED ─put─▶ QUEUED ─take─▶ (its last image taken) RUNNING ─complete─▶ FINISHED
                  │               │                                     │
                  └──── cancel, expire, fail: FINISHED with an error ───┘

*Bounded.*  ``pending``, the number of images reserved or queued, is at most ``max_queue_images``; a request beyond
that is refused with :class:`QueueFull` and a ``retry_after`` that is estimated from the measured times of batches of
each mode.  So is a request whose first turn is expected after more than a third of the time to its deadline; the rest
is for its own images and for a device that slows down.  Admitted work is therefore done in time, and an overload leaves
no long queue behind.

*Fair.*  Queued requests form a ring.  A turn is at most ``quantum`` images (an eighth of a batch), after which a
request with more images goes to the end of the ring.  So a large request fills the part of a batch that nobody else
needs, and a single image waits for one turn of each request before it, not for all of their images.  A request that
has waited a third of the time to its deadline is urgent, and keeps its turn until all of its images are taken.

*Eager.*  A batch leaves as soon as the device asks for one; with ``max_delay_s`` > 0 it waits until it is full or its
oldest request has waited that long.

*Patient.*  On a CPU, the step computes on the cores that decode images, so one batch fewer leaves more time for
decoding.  A batch waits for the next decoded request as long as that costs its own requests less than it saves the
others: ``fixed`` · coming / queued seconds after its last request, where ``fixed`` is the part of a batch's time that
does not grow with its images.  It waits only if requests arrive closer together than that, and at most four times their
usual gap.  A request alone in the queue never waits.

*Certain.*  Every request reaches FINISHED exactly once, and :meth:`Batcher.collect` hands it out exactly once.

Requests of different *modes* (which outputs they ask for) never share a batch; the modes take turns.
This module knows nothing of torch or HTTP.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from app.errors import ClientGone, DeadlineExceeded, InferenceFailed, NotReady, QueueFull

Images = npt.NDArray[np.uint8]  # decoded images, of shape (n, channels, height, width)


class RequestMode(enum.Enum):
    """Which outputs a request asks for: the packed ones alone, with maps, with explanations, or with both."""

    PREDICT = enum.auto()
    MAP = enum.auto()
    EXPLAIN = enum.auto()
    EXPLAIN_WITH_MAP = enum.auto()

    __hash__ = object.__hash__  # Members are singletons; Enum's own is a Python function, called for each look-up.

    @property
    def has_map(self) -> bool:
        """Whether the request needs a model with a map."""
        return self in (RequestMode.MAP, RequestMode.EXPLAIN_WITH_MAP)


class State(enum.Enum):
    """The state of a request's life."""

    RESERVED = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Result:
    """The outputs that the device computed for some images."""

    packed: npt.NDArray[np.float32]  # ``float32 (n, S + K + G)`` outputs (:mod:`psc_core.tasks.base`)
    # The arrays of ``Pipeline.explain`` by name, whose first axis is the images; empty unless asked for.
    explanation: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, images: slice) -> Result:
        """Return a view of some of the images."""
        return Result(self.packed[images], {name: array[images] for name, array in self.explanation.items()})


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request's images on their way through the device; times are seconds of the batcher's clock."""

    count: int
    admitted_at: float
    deadline: float
    urgent_at: float  # the time from which the request keeps its turn until all of its images are taken
    mode: RequestMode  # only requests of one mode share a batch
    waiter: Any  # the caller's object that waits for the result; the queue only stores it
    state: State = State.RESERVED
    # The decoded images; empty while the request is reserved.
    images: Images = field(default_factory=lambda: np.empty((0, 0, 0, 0), np.uint8))
    n_taken: int = 0  # the number of images handed out in batches so far
    n_done: int = 0  # the number of images computed so far
    queued_at: float = 0.0
    # The results so far, by the index of the first image of each slice.
    results: dict[int, Result] = field(default_factory=dict)
    error: Exception | None = None  # the reason why the request failed; ``None`` after FINISHED means success

    def result(self) -> Result:
        """Return the result of all images, once all are computed."""
        slices = [self.results[start] for start in sorted(self.results)]
        if len(slices) == 1:
            return slices[0]
        names = slices[0].explanation
        return Result(
            np.concatenate([each.packed for each in slices]),
            {name: np.concatenate([each.explanation[name] for each in slices]) for name in names},
        )


class RequestSlice(NamedTuple):
    """Images ``start … stop - 1`` of a request."""

    request: QueuedRequest
    start: int
    stop: int


class DeviceBatch(NamedTuple):
    """Slices of requests of one mode, in the order of their outputs; ``size`` images in all."""

    mode: RequestMode
    slices: list[RequestSlice]
    size: int
    taken_at: float
    is_alone: bool = True  # whether no other batch runs, and none could be filled now

    def copy_images(self, buffer: Images) -> None:
        """Copy the images of the slices, in order, to the front of ``buffer``."""
        offset = 0
        for request, start, stop in self.slices:
            buffer[offset : offset + stop - start] = request.images[start:stop]
            offset += stop - start

    def alive(self) -> DeviceBatch:
        """Return the batch without the slices of finished requests."""
        alive = [each for each in self.slices if each.request.state is not State.FINISHED]
        return self._replace(slices=alive, size=sum(each.stop - each.start for each in alive))

    def halves(self) -> tuple[DeviceBatch, DeviceBatch]:
        """Return the batch in two halves, cutting a slice if necessary."""
        half = room = self.size // 2
        left: list[RequestSlice] = []
        right: list[RequestSlice] = []
        for request, start, stop in self.slices:
            cut = min(stop, start + room)
            if cut > start:
                left.append(RequestSlice(request, start, cut))
            if cut < stop:
                right.append(RequestSlice(request, cut, stop))
            room -= cut - start
        return self._replace(slices=left, size=half), self._replace(slices=right, size=self.size - half)


_SMOOTHING: Final = 0.2  # the weight of the newest value in a running mean


def running_mean(mean: float | None, value: float) -> float:
    """Return the mean after a new value, which weighs more than those before it; None is the mean of no values."""
    return value if mean is None else mean + _SMOOTHING * (value - mean)


class BatchTimes:
    """Running means of the times of batches of one mode.

    A batch larger than any measured one is taken to last as long as the largest.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._means: list[float | None] = [None] * (_size_class(max_batch) + 1)

    def add(self, size: int, seconds: float) -> None:
        """Record a batch of ``size`` images that the device has computed in ``seconds``."""
        index = _size_class(size)
        self._means[index] = running_mean(self._means[index], seconds)

    def total(self, images: int) -> float:
        """Return the least time that this many images take, seconds; 0 before the first batch."""
        full, rest = divmod(images, self._max_batch)
        return (full * self._seconds(self._max_batch) if full else 0.0) + (self._seconds(rest) if rest else 0.0)

    @property
    def fixed(self) -> float:
        """The part of a batch's time that does not grow with its images, seconds.

        It is the intercept of the line through the smallest and the largest measured size.
        """
        sizes = (min(1 << index, self._max_batch) for index in range(len(self._means)))
        known = [(size, mean) for size, mean in zip(sizes, self._means, strict=True) if mean is not None]
        if len(known) < 2:
            return 0.0
        (few, quick), (many, slow) = known[0], known[-1]
        return max(0.0, (many * quick - few * slow) / (many - few))

    def _seconds(self, size: int) -> float:
        """Return the time of a batch: that of its size class, else a fraction of a larger one's, else the largest's."""
        smallest = _size_class(size)
        for larger in range(smallest, len(self._means)):
            seconds = self._means[larger]
            if seconds is not None:
                return seconds if larger == smallest else seconds * size / min(1 << larger, self._max_batch)
        return next((mean for mean in reversed(self._means) if mean is not None), 0.0)


def _size_class(size: int) -> int:
    """Return the class of a batch size: 1, 2, 3–4, 5–8, … images."""
    return (size - 1).bit_length()


_MAX_RETRY_AFTER_S: Final = 60
_GAPS: Final = 4  # the longest time that a batch waits for the next request, in usual gaps between two requests
_WAIT_FRACTION: Final = 1 / 3  # the fraction of the time to its deadline that a request may wait for its turn


@dataclass(slots=True)
class _Ring:
    """The queued requests of one mode."""

    times: BatchTimes
    # The queued requests, in the order of their next turns.
    requests: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)
    n_coming: int = 0  # the number of requests still RESERVED
    n_pending: int = 0  # the number of images of reserved or queued requests that are not yet taken
    n_images: int = 0  # the number of images of queued requests that are not yet taken
    n_begun: int = 0  # the number of queued requests that have had a turn


class Batcher:
    """The state machine; every method that depends on time takes ``now`` (seconds, any origin)."""

    def __init__(
        self,
        *,
        max_batch: int,
        max_queue_images: int,
        max_delay_s: float = 0.0,
        shares_cores: bool = False,
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        self.max_batch = max_batch
        self._max_queue = max_queue_images
        self.max_delay_s = max_delay_s  # the longest time that a batch waits to fill, seconds; 0 sends it at once
        self._elsewhere = elsewhere  # the number of requests that other processes decode and that are not reserved yet
        self._shares_cores = shares_cores  # whether the step computes on the cores that decode images
        self.quantum = max(1, max_batch // 8)  # the number of images in a turn
        # The ring of a mode begins with the first request of that mode.
        self._rings = defaultdict[RequestMode, _Ring](lambda: _Ring(BatchTimes(max_batch)))
        self._live: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.finished: list[QueuedRequest] = []  # the finished requests that :meth:`collect` has not handed out yet
        self._closed = ""
        self._last_put = self._last_end = -math.inf
        self._gap: float | None = None  # The time between two requests from the decoders, seconds.

    @property
    def pending(self) -> int:
        """The number of images reserved or queued."""
        return sum([ring.n_pending for ring in self._rings.values()])

    def check(self, count: int, *, now: float, deadline: float, mode: RequestMode = RequestMode.PREDICT) -> None:
        """Refuse, before its body is read, a request that :meth:`reserve` would refuse."""
        if self._closed:
            raise NotReady(self._closed)
        if (pending := self.pending) + count > self._max_queue:
            raise QueueFull(
                f"the queue has no room for {count} images ({pending} of {self._max_queue} places are taken); "
                f"try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )
        before = self._images_before(count, mode)
        wait = sum([self._rings[each].times.total(images) for each, images in before.items()])
        longest = _WAIT_FRACTION * (deadline - now)
        if wait > longest:
            raise QueueFull(
                f"the {sum(before.values())} images before this request take about {wait:.3g} s, more than the "
                f"{longest:.3g} s that it can wait; try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )

    def reserve(
        self,
        count: int,
        *,
        now: float,
        deadline: float,
        mode: RequestMode = RequestMode.PREDICT,
        waiter: Any = None,
        came: float | None = None,
    ) -> QueuedRequest:
        """Admit a request before its images are decoded; ``came`` is given where another process has decoded them."""
        self.check(count, now=now, deadline=deadline, mode=mode)
        urgent_at = now + _WAIT_FRACTION * (deadline - now)
        request = QueuedRequest(count, now if came is None else came, deadline, urgent_at, mode, waiter)
        self._live[request] = None
        ring = self._rings[mode]
        ring.n_coming += 1
        ring.n_pending += count
        return request

    def put(self, request: QueuedRequest, images: Images, *, now: float) -> bool:
        """Queue a reserved request; return False if it has finished already (cancelled or expired)."""
        if request.state is not State.RESERVED:
            return False
        self._gap = running_mean(self._gap, now - max(request.admitted_at, self._last_put))
        self._last_put = now
        request.state = State.QUEUED
        request.images = images
        request.queued_at = now
        ring = self._rings[request.mode]
        ring.n_coming -= 1
        ring.requests[request] = None
        ring.n_images += request.count
        return True

    def finish(self, request: QueuedRequest, error: Exception | None) -> None:
        """End one request, with an error or with the results that it has, unless it has ended already."""
        # A result, the deadline, the client's departure and a dead device may race for one request: the first wins.
        if request.state is State.FINISHED:
            return
        ring = self._rings[request.mode]
        if request.state is State.RESERVED:
            ring.n_coming -= 1
        elif request.state is State.QUEUED:
            del ring.requests[request]
            ring.n_images -= request.count - request.n_taken
            ring.n_begun -= request.n_taken > 0
        ring.n_pending -= request.count - request.n_taken
        request.state = State.FINISHED
        request.error = error
        del self._live[request]
        self.finished.append(request)

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request whose client has left; results that the device still computes for it are ignored."""
        self.finish(request, ClientGone("the client closed the connection"))

    def fail_all(self, error: Exception) -> None:
        """End every live request with ``error``."""
        for request in list(self._live):
            self.finish(request, error)

    def expire(self, now: float) -> None:
        """End every request whose deadline has passed."""
        for request in [request for request in self._live if request.deadline <= now]:
            self._expire(request)

    def close(self, reason: str) -> None:
        """Admit no more requests; those that were admitted still run."""
        self._closed = reason

    def due_in(self, now: float, *, least: int = 1) -> float | None:
        """Return the seconds until :meth:`take` returns a batch: 0 for now, None until another request is put."""
        waits = [self._due_in(ring, now, least=least) for ring in self._rings.values()]
        return min([wait for wait in waits if wait is not None], default=None)

    def take(self, now: float, *, least: int = 1, patient: bool = True) -> DeviceBatch | None:
        """Return the next batch, or None if none is due.

        It has at least ``least`` images; with ``patient``, one waits for RESERVED requests if that saves time.
        """
        for mode, ring in list(self._rings.items()):
            # A ring may be due for requests that turn out to be past their deadline; it is asked again without them.
            while self._due_in(ring, now, least=least, patient=patient) == 0:
                batch = self._fill(mode, ring, now)
                if batch is not None:
                    # A dict keeps the order of insertion, so this mode's next turn comes after those of the others.
                    self._rings[mode] = self._rings.pop(mode)
                    return batch
        return None

    def complete(self, batch: DeviceBatch, result: Result, *, now: float) -> None:
        """Give each request its part of a batch's result.

        A request whose images are all done finishes; one with an output that is not finite fails.
        """
        # With two slots a batch is taken while the device still works on the one before it: that wait does not count.
        self._rings[batch.mode].times.add(batch.size, now - max(batch.taken_at, self._last_end))
        self._last_end = now
        finite: list[bool] = np.asarray(np.isfinite(result.packed).all(axis=1)).tolist()
        offset = 0
        for request, start, stop in batch.slices:
            images = slice(offset, offset + stop - start)
            offset = images.stop
            if not all(finite[images]):
                image = start + finite[images].index(False)
                self.finish(request, InferenceFailed(image, "the network's outputs are not finite"))
            # A request may have been cancelled or have expired while the device ran; ``finish`` then does nothing.
            request.results[start] = result[images]
            request.n_done += stop - start
            if request.n_done == request.count:
                self.finish(request, None)

    def collect(self) -> list[QueuedRequest]:
        """Return the requests that have finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def retry_after(self) -> int:
        """Return how many seconds the queue takes to drain, a whole number from 1 to 60."""
        seconds = sum(ring.times.total(ring.n_pending) for ring in self._rings.values())
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))

    def _images_before(self, count: int, mode: RequestMode) -> dict[RequestMode, int]:
        """Return how many images of each mode are taken before a new request has its first turn.

        A request of at most one turn waits for one turn of each request of its mode; a larger one for all their images.
        As the modes take turns, at most one batch of each other mode goes before each batch of its own.
        """
        ring = self._rings[mode]
        turns = (ring.n_coming + len(ring.requests)) * self.quantum
        same = min(ring.n_pending, turns) if count <= self.quantum else ring.n_pending
        others = (same // self.max_batch + 1) * self.max_batch
        return {each: same if each is mode else min(ring.n_pending, others) for each, ring in self._rings.items()}

    def _due_in(self, ring: _Ring, now: float, *, least: int = 1, patient: bool = True) -> float | None:
        if not ring.requests or ring.n_images < least:
            return None
        # A request that has had a turn has waited once, and the rest of its images must not wait again.
        if ring.n_images >= self.max_batch or ring.n_begun:
            return 0.0
        wait = next(iter(ring.requests)).queued_at + self.max_delay_s - now
        if patient and self._shares_cores and (coming := ring.n_coming + self._elsewhere()):
            saved, gap = ring.times.fixed * coming / len(ring.requests), self._gap or 0.0
            if saved > gap:
                # Not longer: a stall of the machine looks like a long batch and inflates ``fixed``.
                wait = max(wait, next(reversed(ring.requests)).queued_at + min(saved, _GAPS * gap) - now)
        return max(0.0, wait)

    def _fill(self, mode: RequestMode, ring: _Ring, now: float) -> DeviceBatch | None:
        slices: list[RequestSlice] = []
        room = self.max_batch
        while room and ring.requests:
            request = next(iter(ring.requests))
            if request.deadline <= now:
                self._expire(request)
                continue
            keeps_turn = len(ring.requests) == 1 or request.urgent_at <= now
            turn = room if keeps_turn else min(room, self.quantum)
            start, stop = request.n_taken, min(request.count, request.n_taken + turn)
            slices.append(RequestSlice(request, start, stop))
            # A request has begun if some images are taken and some are left: the first of several turns adds one, the
            # last subtracts one, and a single turn does neither.
            ring.n_begun += (stop < request.count) - (start > 0)
            request.n_taken = stop
            room -= stop - start
            ring.n_pending -= stop - start
            ring.n_images -= stop - start
            if stop == request.count:
                request.state = State.RUNNING
                del ring.requests[request]
            elif not keeps_turn:
                ring.requests.move_to_end(request)
        return DeviceBatch(mode, slices, self.max_batch - room, now) if slices else None

    def _expire(self, request: QueuedRequest) -> None:
        seconds = request.deadline - request.admitted_at
        self.finish(request, DeadlineExceeded(f"deadline exceeded after {seconds:.3g} s; try again"))


class RequestQueue:
    """A :class:`Batcher` that the event loop, decode threads and device threads share, one at a time::

        with queue as batcher:
            request = batcher.reserve(...)

    Requests that finish in the block are delivered when it ends, without holding the lock.  A blocked :meth:`take` is
    woken if its batch is now due earlier.  While one device thread computes, another begins only with a turn of images:
    the rest would find a fuller batch a moment later.
    """

    def __init__(self, batcher: Batcher, deliver: Callable[[list[QueuedRequest]], None]) -> None:
        self._batcher = batcher  # the state machine; nobody else may touch it
        self._deliver = deliver  # called with the requests that have just finished, on the thread that finished them
        self._condition = threading.Condition(threading.Lock())
        self.stopped = False  # whether :meth:`stop` was called
        self._wakes_at: dict[int, float] = {}  # when each blocked take looks again, by its thread
        self._busy = set[int]()  # the threads that compute a batch

    def __enter__(self) -> Batcher:
        self._condition.acquire()
        return self._batcher

    def __exit__(self, *_: object) -> None:
        finished = self._batcher.collect()
        if self._wakes_at:  # Otherwise no take is blocked, and asking for the next batch is wasted.
            now = time.monotonic()
            due_in = self._batcher.due_in(now, least=self._least())
            if due_in is not None and now + due_in < min(self._wakes_at.values()):
                self._condition.notify()
        self._condition.release()
        if finished:
            self._deliver(finished)

    def put(self, decoded: list[tuple[QueuedRequest, Images]]) -> None:
        """Queue reserved requests with their images."""
        with self as batcher:
            now = time.monotonic()
            for request, images in decoded:
                batcher.put(request, images, now=now)

    def take(self, *, block: bool, full: bool = False) -> DeviceBatch | None:
        """Return the next batch, or None if none is due or the queue was stopped; with ``block``, wait for one.

        With ``full``, behind a running batch, only one of ``max_batch`` images.
        """
        thread = threading.get_ident()
        while True:
            with self as batcher:
                if not full:
                    self._busy.discard(thread)
                now, least = time.monotonic(), batcher.max_batch if full else self._least()
                batch = batcher.take(now, least=least, patient=block)
                if batch is not None:
                    is_alone = not self._busy - {thread} and not batcher.pending
                    self._busy.add(thread)
                    return batch._replace(is_alone=is_alone)
                if not block or self.stopped:
                    return None
                if not batcher.finished:  # Otherwise take() has expired requests, to be delivered before we wait.
                    due_in = batcher.due_in(now, least=least)
                    self._wakes_at[thread] = math.inf if due_in is None else now + due_in
                    self._condition.wait(due_in)
                    del self._wakes_at[thread]

    def _least(self) -> int:
        """Return with how many images a batch may begin now."""
        return self._batcher.quantum if self._busy else 1

    def stop(self) -> None:
        """Make :meth:`take` return at once, now if it is blocked and from now on."""
        with self._condition:
            self.stopped = True
            self._condition.notify_all()
