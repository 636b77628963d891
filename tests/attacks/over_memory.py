"""Attacks on memory, each on a service of its own that has little, so that it alone would end."""

from __future__ import annotations

import io
import threading
import time
from collections import Counter
from typing import NamedTuple

import httpx
import numpy as np
from PIL import Image

from tests.attacks.started import Seen, is_ready, service

CLIENTS = 32
LIMIT_MIB = 1400


class Sent(NamedTuple):
    """What the clients got from a service with little memory.

    Attributes:
        statuses: How many answers of each status, and errors of each kind.
        is_ready: Whether it was ready as soon as the last client had its answer.
        recovers: Whether it was within a minute.
        peak_mib: The most memory that it had; its limit where it is gone.
    """

    statuses: Counter[object]
    is_ready: bool
    recovers: bool
    peak_mib: int

    def seen(self, limit_mib: int, *, is_wanted: bool) -> Seen:
        """What the table says of it."""
        counts = ", ".join(f"{count} × {status}" for status, count in self.statuses.items())
        return Seen(f"{counts}, {self.peak_mib} of {limit_mib} MiB", is_wanted)


def photographs(_url: str) -> Seen:
    """Three of 12 MB from each of many clients."""
    found = _send(LIMIT_MIB)
    if found is None:
        return NOT_TRIED
    is_wanted = found.is_ready and 200 in found.statuses and set(found.statuses) <= {200, 429, 503}
    return found.seen(LIMIT_MIB, is_wanted=is_wanted)


def nearly_full(_url: str) -> Seen:
    """The same where it has but a fifth more than an idle service takes: it refuses, and nothing is killed."""
    with service() as started:
        limit = (started.resident_bytes() >> 20) * 6 // 5
    found = _send(limit)
    if found is None:
        return NOT_TRIED
    return found.seen(
        limit, is_wanted=found.recovers and 503 in found.statuses and set(found.statuses) <= {200, 429, 503}
    )


NOT_TRIED = Seen("not tried: no control group may be made here", True)


def _send(limit_mib: int) -> Sent | None:
    pixels = np.random.default_rng(0).integers(0, 255, (3000, 4000, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    photo, statuses = buffer.getvalue(), Counter[object]()
    with service(memory_mib=limit_mib) as started:
        if not started.is_limited:
            return None

        def send() -> None:
            for _ in range(3):
                try:
                    answer = httpx.post(
                        f"{started.url}/predict", content=photo, headers={"content-type": "image/jpeg"}, timeout=120
                    )
                    statuses[answer.status_code] += 1
                except httpx.TransportError as error:
                    statuses[type(error).__name__] += 1

        threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ready = recovers = is_ready(started.url)
        end = time.monotonic() + 60
        while not recovers and time.monotonic() < end:
            time.sleep(0.1)
            recovers = is_ready(started.url)
        return Sent(statuses, ready, recovers, started.peak_bytes() >> 20 if recovers else limit_mib)
