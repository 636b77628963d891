"""The queue between two threads."""

from __future__ import annotations

import threading
import time

from app.inference.queue import RequestQueue
from app.inference.request import DeviceBatch, QueuedRequest
from tests.app.inference.support import NO_IMAGES, complete, make


def test_put_wakes_a_blocked_take_and_delivers_once() -> None:
    delivered: list[QueuedRequest] = []
    queue = RequestQueue(make(batch=4), delivered.extend)
    taken: list[DeviceBatch | None] = []

    def work() -> None:
        while not queue.stopped:
            batch = queue.take(block=True)
            if batch is not None:
                taken.append(batch)
                with queue as batcher:
                    complete(batcher, batch, time.monotonic())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10.0
    with queue as batcher:
        requests = [batcher.reserve(3, now=time.monotonic(), deadline=deadline) for _ in range(5)]
    queue.put([(request, NO_IMAGES) for request in requests])
    while len(delivered) < len(requests) and time.monotonic() < deadline:
        thread.join(0.001)
    queue.stop()
    thread.join(5.0)
    assert not thread.is_alive()
    assert sorted(map(id, delivered)) == sorted(map(id, requests))
    assert all(request.error is None for request in requests)
