"""The queue between the threads that admit and decode requests and the device thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from app.inference.batcher import Batcher
from app.inference.request import DeviceBatch, Images, QueuedRequest


class RequestQueue:
    """A :class:`Batcher` that the event loop, decode threads and the device thread share, one at a time::

        with queue as batcher:
            request = batcher.reserve(...)

    Requests that finish in the block are delivered when it ends, without holding the lock.  A blocked :meth:`take` is
    woken if its batch is now due earlier.

    Args:
        batcher: The state machine; nobody else may touch it.
        deliver: Called with the requests that have just finished, on the thread that finished them.
    """

    def __init__(self, batcher: Batcher, deliver: Callable[[list[QueuedRequest]], None]) -> None:
        self._batcher = batcher
        self._deliver = deliver
        self._condition = threading.Condition(threading.Lock())
        self._stopped = False
        self._wakes_at = -math.inf

    def __enter__(self) -> Batcher:
        self._condition.acquire()
        return self._batcher

    def __exit__(self, *_: object) -> None:
        finished = self._batcher.collect()
        if self._wakes_at != -math.inf:  # Otherwise no take is blocked, and asking for the next batch is wasted.
            now = time.monotonic()
            due_in = self._batcher.due_in(now)
            if due_in is not None and now + due_in < self._wakes_at:
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
        """Return the next batch, or None if none is due or the queue was stopped; with ``block``, wait for one."""
        while True:
            with self as batcher:
                now = time.monotonic()
                batch = batcher.take(now, full=full, patient=block)
                if batch is not None or not block or self._stopped:
                    return batch
                if not batcher.finished:  # Otherwise take() has expired requests, to be delivered before we wait.
                    due_in = batcher.due_in(now)
                    self._wakes_at = math.inf if due_in is None else now + due_in
                    self._condition.wait(due_in)
                self._wakes_at = -math.inf

    def stop(self) -> None:
        """Make :meth:`take` return at once, now if it is blocked and from now on."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopped
