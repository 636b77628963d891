"""The queue between two threads."""

from __future__ import annotations

import threading
import time

from app.inference.batcher import DeviceBatch, QueuedRequest, RequestQueue
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


def test_departure_wakes_a_take_that_waits_for_it() -> None:
    """A batch and a decoded image take a day each: a queued request waits for one in decoding, until that leaves."""
    batcher, day = make(batch=8, shares_cores=True), 86_400.0
    for count, now in ((1, -7 * day), (8, -4 * day)):
        request = batcher.reserve(count, now=now, deadline=1e9)
        batcher.put(request, NO_IMAGES, now=now + day)
        batch = batcher.take(now + day)
        assert batch is not None
        complete(batcher, batch, now + 2 * day + count)
    queue = RequestQueue(batcher, lambda _: None)
    now = time.monotonic()
    with queue:
        queued, decoding = (batcher.reserve(1, now=now, deadline=now + 1e9) for _ in range(2))
    taken: list[DeviceBatch | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take(block=True)), daemon=True)
    thread.start()
    queue.put([(queued, NO_IMAGES)])
    thread.join(0.05)
    assert not taken
    with queue:
        batcher.cancel(decoding)
    thread.join(30.0)
    assert [batch.slices[0].request for batch in taken if batch is not None] == [queued]
