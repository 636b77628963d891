"""Decide which images run next: a state machine with an explicit clock.

The life of a :class:`QueuedRequest` of ``count`` images::

    reserve ─▶ RESERVED ─put─▶ QUEUED ─take─▶ (its last image taken) RUNNING ─complete─▶ FINISHED
                  │               │                                     │
                  └──── cancel, expire, fail: FINISHED with an error ───┘

*Bounded.*  ``pending`` = images reserved or queued ≤ ``max_queue_images``; beyond it a request is refused with
:class:`QueueFull` and a ``retry_after`` from the measured times of batches.  So is a request whose turn would come,
by those times, after a third of the time to its deadline; the rest is for its own images and for a device that slows
down.  Admitted work is therefore done in time, and an overload leaves no long queue behind.

*Fair.*  Queued requests stand in a ring; a turn is at most ``quantum`` images (an eighth of a batch), after which a
request with more images goes to the end of the ring.  A large request fills batches that nobody else needs, and a
single image waits for one turn of each request before it, not for all of their images.  A request that has waited a
third of the time to its deadline is urgent and keeps its turn until all of its images are taken.

*Eager.*  A batch leaves as soon as the device asks for one; with ``max_delay_s`` > 0 it waits until it is full or its
oldest request has waited that long.

*Patient.*  Where the step computes on the cores that decode, a batch fewer is time for those who still decode.  A batch
waits for the next of them while that costs the requests in it less than it saves the others: for ``fixed`` · coming /
queued seconds behind its last request, if requests come less than that apart, and for twice that gap at most; ``fixed``
is the time of a batch that does not grow with its images.  A lonely request never waits.

*Certain.*  Every request reaches FINISHED exactly once and is handed out exactly once by :meth:`Batcher.collect`.

Requests of different *kinds* (another computation of the same model) never share a batch; kinds take turns.
No torch and no HTTP in this module.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from app.errors import ClientGone, DeadlineExceeded, InferenceFailed, NotReady, QueueFull
from app.inference.batch_times import BatchTimes
from app.inference.request import DeviceBatch, Images, QueuedRequest, RequestKind, RequestSlice, Result, State

_MAX_RETRY_AFTER_S: Final = 60
_WAIT_FRACTION: Final = 1 / 3
"""Fraction of the time to the deadline that a request may spend waiting for its turn."""


@dataclass(slots=True)
class _Ring:
    """The queued requests of one kind.

    Attributes:
        requests: In the order of their next turns.
        n_coming: Requests still RESERVED.
        n_images: Images of the queued ones that are not yet taken.
        n_begun: Requests that have had a turn.
    """

    requests: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)
    n_coming: int = 0
    n_images: int = 0
    n_begun: int = 0


class Batcher:
    """The state machine; every method that depends on time takes ``now`` (seconds, any origin).

    Args:
        max_batch: Maximum number of images in a batch.
        max_queue_images: Maximum number of images reserved or queued.
        max_delay_s: How long a batch may wait to fill; 0 sends it at once.
        shares_cores: Whether the step computes on the cores that decode.

    Attributes:
        pending: Images reserved or queued.
        finished: Requests that :meth:`collect` has not handed out yet.
    """

    def __init__(
        self, *, max_batch: int, max_queue_images: int, max_delay_s: float = 0.0, shares_cores: bool = False
    ) -> None:
        self.max_batch = max_batch
        self._max_queue = max_queue_images
        self.max_delay_s = max_delay_s
        self._shares_cores = shares_cores
        self._quantum = max(1, max_batch // 8)
        self._rings: dict[RequestKind, _Ring] = {}
        self._live: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.finished: list[QueuedRequest] = []
        self.pending = 0
        self._closed = ""
        self._times = BatchTimes(max_batch)
        self._gaps = BatchTimes(1)  # Between requests that come from the decoders.

    @property
    def idle(self) -> bool:
        """True when no request is alive."""
        return not self._live

    def check(self, count: int, *, now: float, deadline: float) -> None:
        """Refuse a request that :meth:`reserve` would refuse, before its body is read.

        Raises:
            QueueFull: No room, or too little time to ``deadline`` at the present rate.
            NotReady: Closed.
        """
        if self._closed:
            raise NotReady(self._closed)
        if self.pending + count > self._max_queue:
            raise QueueFull(
                f"the queue has no room for {count} images ({self.pending} of {self._max_queue} places are taken); "
                f"try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )
        # A small request is done after its first turn, for which it waits one turn of each request before it.
        first_turn = len(self._live) * self._quantum if count <= self._quantum else self.pending
        before = min(self.pending, first_turn)
        longest, wait = _WAIT_FRACTION * (deadline - now), self._times.total(before)
        if wait > longest:
            raise QueueFull(
                f"the {before} images before this request take about {wait:.3g} s, more than the {longest:.3g} s that "
                f"it can wait; try again in {self.retry_after()} s",
                retry_after=self.retry_after(),
            )

    def reserve(
        self, count: int, *, now: float, deadline: float, kind: RequestKind = RequestKind.PREDICT, waiter: Any = None
    ) -> QueuedRequest:
        """Admit a request before its images are decoded.

        Raises:
            QueueFull: No room, or too little time to ``deadline`` at the present rate.
            NotReady: Closed.
        """
        self.check(count, now=now, deadline=deadline)
        request = QueuedRequest(count, now, deadline, now + _WAIT_FRACTION * (deadline - now), kind, waiter)
        self._live[request] = None
        self._rings.setdefault(kind, _Ring()).n_coming += 1
        self.pending += count
        return request

    def put(self, request: QueuedRequest, images: Images, *, now: float) -> bool:
        """Queue a reserved request; ``False`` when it has finished already (cancelled, expired)."""
        if request.state is not State.RESERVED:
            return False
        self._gaps.add(1, request.admitted_at, now)
        request.state = State.QUEUED
        request.images = images
        request.queued_at = now
        ring = self._rings[request.kind]
        ring.n_coming -= 1
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

    def due_in(self, now: float) -> float | None:
        """Seconds until :meth:`take` would give a batch: 0 now, ``None`` not before something is put."""
        soonest = None
        for ring in self._rings.values():
            wait = self._due_in(ring, now)
            if wait is not None and (soonest is None or wait < soonest):
                soonest = wait
        return soonest

    def take(self, now: float, *, full: bool = False, patient: bool = True) -> DeviceBatch | None:
        """The next batch, or ``None`` if none is due.

        Args:
            now: The time.
            full: Only a batch of ``max_batch``, whatever the delay.
            patient: Wait for requests that are still RESERVED, where it pays.
        """
        for kind, ring in list(self._rings.items()):
            # A ring that was due may hold only requests whose deadline has passed; it is asked again without them.
            while self._due_in(ring, now, full=full, patient=patient) == 0:
                batch = self._fill(kind, ring, now)
                if batch is not None:
                    # A dict keeps the order of insertion: this kind's next turn comes after those of the others.
                    self._rings[kind] = self._rings.pop(kind)
                    return batch
        return None

    def complete(self, batch: DeviceBatch, result: Result, *, now: float) -> None:
        """Give each request its part of a batch's result.

        Requests whose images are all done are finished; one with outputs that are not finite fails.
        """
        self._times.add(batch.size, batch.taken_at, now)
        finite: list[bool] = np.asarray(np.isfinite(result.packed).all(axis=1)).tolist()
        offset = 0
        for request, start, stop in batch.slices:
            images = slice(offset, offset + stop - start)
            offset = images.stop
            if not all(finite[images]):
                image = start + finite[images].index(False)
                self._finish(request, InferenceFailed(image, "the network's outputs are not finite"))
            # A request that was cancelled or has expired meanwhile comes by too; ``_finish`` ignores it.
            request.results[start] = result[images]
            request.n_done += stop - start
            if request.n_done == request.count:
                self._finish(request, None)

    def collect(self) -> list[QueuedRequest]:
        """Requests finished since the last call, each exactly once."""
        finished, self.finished = self.finished, []
        return finished

    def retry_after(self) -> int:
        """Whole seconds in which the present queue drains, 1 to 60."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._times.total(self.pending))))

    def _due_in(self, ring: _Ring, now: float, *, full: bool = False, patient: bool = True) -> float | None:
        if not ring.requests or (full and ring.n_images < self.max_batch):
            return None
        # A request that has begun has waited once; the rest of its images does not wait again.
        if ring.n_images >= self.max_batch or ring.n_begun:
            return 0.0
        wait = next(iter(ring.requests)).queued_at + self.max_delay_s - now
        if patient and self._shares_cores and ring.n_coming:
            worth, gap = self._times.fixed * ring.n_coming / len(ring.requests), self._gaps.total(1)
            if worth > gap:
                # At most twice the gap: a stall of the machine counts as a long batch, and all would wait for long.
                wait = max(wait, next(reversed(ring.requests)).queued_at + min(worth, 2 * gap) - now)
        return max(0.0, wait)

    def _fill(self, kind: RequestKind, ring: _Ring, now: float) -> DeviceBatch | None:
        slices: list[RequestSlice] = []
        room = self.max_batch
        while room and ring.requests:
            request = next(iter(ring.requests))
            if request.deadline <= now:
                self._expire(request)
                continue
            keeps_turn = len(ring.requests) == 1 or request.urgent_at <= now
            turn = room if keeps_turn else min(room, self._quantum)
            start, stop = request.n_taken, min(request.count, request.n_taken + turn)
            slices.append(RequestSlice(request, start, stop))
            # Begun means some images taken, some left: one more with a first turn, one less with the last, and neither
            # for a request that needs a single turn.
            ring.n_begun += (stop < request.count) - (start > 0)
            request.n_taken = stop
            room -= stop - start
            self.pending -= stop - start
            ring.n_images -= stop - start
            if stop == request.count:
                request.state = State.RUNNING
                del ring.requests[request]
            elif not keeps_turn:
                ring.requests.move_to_end(request)
        return DeviceBatch(kind, slices, self.max_batch - room, now) if slices else None

    def _expire(self, request: QueuedRequest) -> None:
        seconds = request.deadline - request.admitted_at
        self._finish(request, DeadlineExceeded(f"deadline exceeded after {seconds:.3g} s; try again"))

    def _finish(self, request: QueuedRequest, error: Exception | None) -> None:
        # A result, a deadline, a departed client and a dead device may race for one request: the first ends it.
        if request.state is State.FINISHED:
            return
        ring = self._rings[request.kind]
        if request.state is State.RESERVED:
            ring.n_coming -= 1
        elif request.state is State.QUEUED:
            del ring.requests[request]
            ring.n_images -= request.count - request.n_taken
            ring.n_begun -= request.n_taken > 0
        self.pending -= request.count - request.n_taken
        request.state = State.FINISHED
        request.error = error
        del self._live[request]
        self.finished.append(request)
