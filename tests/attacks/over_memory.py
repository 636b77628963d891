"""Attacks on memory, each on a service of its own that has little, so that it alone would end."""

from __future__ import annotations

import io
import threading
from collections import Counter

import httpx
import numpy as np
from PIL import Image

from tests.attacks.started import Seen, is_ready, service

CLIENTS = 32
LIMIT_MIB = 1400


def photographs(_url: str) -> Seen:
    """Three of 12 MB from each of many clients."""
    pixels = np.random.default_rng(0).integers(0, 255, (3000, 4000, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    photo, statuses = buffer.getvalue(), Counter[object]()
    with service(memory_mib=LIMIT_MIB) as started:
        if not started.is_limited:
            return Seen("not tried: no control group may be made here", True)

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
        ready = is_ready(started.url)
        peak = started.peak_bytes() >> 20 if ready else LIMIT_MIB
    counts = ", ".join(f"{count} × {status}" for status, count in statuses.items())
    return Seen(f"{counts}, {peak} MiB", ready and 200 in statuses and set(statuses) <= {200, 429, 503})
