"""Attacks on memory, each on a service of its own that has little, so that it alone would end."""

from __future__ import annotations

import io
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

from tests.served import is_ready
from tools.service import EXAMPLE, Seen, Status, ask, service

CLIENTS = 32
FEW = 8
LIMIT_MIB = 1400


class Sent(NamedTuple):
    """What the clients got from a service with little memory."""

    statuses: Counter[Status]  # how many answers of each, and errors of each kind
    is_ready: bool  # as soon as the last client had its answer
    recovers: bool  # within a minute
    peak_mib: int  # its limit where it is gone

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


def killed(_url: str) -> Seen:
    """Neighbours take the memory of its group, until the kernel kills the service, which is the largest."""
    answers, lost = Counter[str](), Counter[str]()
    with service(memory_mib=LIMIT_MIB) as started:
        if not started.is_limited:
            return NOT_TRIED

        def send() -> None:
            with httpx.Client(base_url=started.url, timeout=60) as client:
                while True:
                    try:
                        answer = client.post("/predict", content=EXAMPLE, headers={"content-type": "image/png"})
                    except httpx.ConnectError:  # Nobody listens any more, so that nothing is lost.
                        return
                    except httpx.TransportError as error:
                        lost[type(error).__name__] += 1
                        continue
                    is_right = answer.is_success and '"label":"7"' in answer.text
                    answers["right" if is_right else str(answer.status_code)] += 1

        with ThreadPoolExecutor(FEW) as pool:
            sent = [pool.submit(send) for _ in range(FEW)]
            while answers["right"] < 10 * FEW and not all(each.done() for each in sent):
                time.sleep(0.01)
            with started.neighbours(FEW, LIMIT_MIB // FEW):
                for each in sent:
                    each.result()
                was_killed = started.was_killed()
    # A client that sends again at once may find the socket of the process that is being killed, and lose that too.
    now = f"{answers['right']} right answers, then {lost.total()} requests of {FEW} clients without one"
    return Seen(now, was_killed and set(answers) <= {"right", "429", "503"})


NOT_TRIED = Seen("not tried: no control group may be made here", None)


def _send(limit_mib: int) -> Sent | None:
    pixels = np.random.default_rng(0).integers(0, 255, (3000, 4000, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    photograph: dict[str, Any] = {"content": buffer.getvalue(), "headers": {"content-type": "image/jpeg"}}
    with service(memory_mib=limit_mib) as started:
        if not started.is_limited:
            return None
        with ThreadPoolExecutor(CLIENTS) as pool:
            statuses = Counter(pool.map(lambda _: ask(started.url, **photograph), range(3 * CLIENTS)))
        ready = recovers = is_ready(started.url)
        end = time.monotonic() + 60
        while not recovers and time.monotonic() < end:
            time.sleep(0.1)
            recovers = is_ready(started.url)
        return Sent(statuses, ready, recovers, started.peak_bytes() >> 20 if recovers else limit_mib)
