"""Put requests whose images are decoded into the queue, and compute them here if the step is quick.

Everything runs on the event loop, which alone touches the arrivals: they need no lock.
"""

from __future__ import annotations

import asyncio

from app.inference.queue import RequestQueue
from app.inference.request import Images, QueuedRequest
from app.inference.worker import DeviceWorker


class Arrivals:
    """The requests that one turn of the event loop brings.

    Args:
        loop: The event loop.
        queue: The queue that takes them.
        worker: Computes them, on the event loop if it is ``inline``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: RequestQueue, worker: DeviceWorker) -> None:
        self._loop = loop
        self._queue = queue
        self._worker = worker
        self._requests: list[tuple[QueuedRequest, Images]] = []

    def add(self, request: QueuedRequest, images: Images) -> None:
        """Queue a request with those that come in the same turn, and compute them when no more come or a batch is full.

        Together they cost one lock and one wake-up of the device thread.
        """
        if not self._requests:
            self._loop.call_soon(self._put)
        self._requests.append((request, images))

    def _put(self) -> None:
        arrived, self._requests = self._requests, []
        self._queue.put(arrived)
        if self._worker.inline:
            with self._queue as batcher:
                full = batcher.pending >= batcher.max_batch
            if full:
                self._worker.run_due()
            else:
                self._loop.call_soon(self._run_unless_more_came)

    def _run_unless_more_came(self) -> None:
        """Compute the queued requests, unless the last turn of the loop brought more, which make a fuller batch."""
        if not self._requests:
            self._worker.run_due()
