"""The queue between those who admit and decode requests and the device thread."""

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

    Requests that finished in the block are delivered when it ends, without the lock.  A blocked :meth:`take` is woken
    if its batch is due earlier than it knew.

    Args:
        batcher: The state machine; nobody else may touch it.
        deliver: Called on the thread that finished them, with the requests just finished.
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
        if self._wakes_at != -math.inf:  # A take is blocked.
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
        """The next batch; waits for one when ``block``.  ``None``: none due, or stopped."""
        while True:
            with self as batcher:
                now = time.monotonic()
                batch = batcher.take(now, full=full, patient=block)
                if batch is not None or not block or self._stopped:
                    return batch
                if not batcher.finished:  # Requests that expired meanwhile are delivered before we wait.
                    due_in = batcher.due_in(now)
                    self._wakes_at = math.inf if due_in is None else now + due_in
                    self._condition.wait(due_in)
                self._wakes_at = -math.inf

    def stop(self) -> None:
        """Make a blocked and every later :meth:`take` return."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    @property
    def stopped(self) -> bool:
        """True once :meth:`stop` was called."""
        return self._stopped
