"""The queue between the event loop and the device thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from app.inference.batcher import Batcher
from app.inference.request import DeviceBatch, Images, QueuedRequest, Result


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

    def put(self, decoded: list[tuple[QueuedRequest, Images]]) -> None:
        """Queue reserved requests with their images, and wake the device thread once."""
        now = self.clock()
        with self._condition:
            for request, images in decoded:
                self._batcher.put(request, images, now=now)
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

    def complete(self, batch: DeviceBatch, result: Result) -> None:
        """See :meth:`Batcher.complete`."""
        now = self.clock()
        with self._delivering():
            self._batcher.complete(batch, result, now=now)

    def cancel(self, requests: Iterable[QueuedRequest]) -> None:
        """See :meth:`Batcher.cancel`."""
        with self._delivering():
            for request in requests:
                self._batcher.cancel(request)

    def fail(self, request: QueuedRequest, error: Exception) -> None:
        """See :meth:`Batcher.fail`."""
        with self._delivering():
            self._batcher.fail(request, error)

    def fail_all(self, error: Exception) -> None:
        """See :meth:`Batcher.fail_all`."""
        with self._delivering():
            self._batcher.fail_all(error)

    def expire(self) -> None:
        """See :meth:`Batcher.expire`."""
        now = self.clock()
        with self._delivering():
            self._batcher.expire(now)

    def close(self, reason: str) -> None:
        """See :meth:`Batcher.close`."""
        with self._delivering():
            self._batcher.close(reason)

    def stop(self) -> None:
        """Make a blocked and every later :meth:`take` return."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopped

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        """With the lock; then whatever has finished is delivered without it."""
        with self._condition:
            yield
            finished = self._batcher.collect()
        self._hand_over(finished)

    def _hand_over(self, finished: list[QueuedRequest]) -> None:
        if finished:
            self._deliver(finished)
