"""One phase of load, sent from a process of its own; imports nothing heavy, so that it starts quickly."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.client import Generator, Load


@dataclass(frozen=True)
class Target:
    """Where requests go and what they carry.

    Attributes:
        port: Of the server on this machine.
        path: To post to.
        content_type: Of the bodies.
        bodies: Each request carries a random one.
        images: Number in each body.
    """

    port: int
    path: str
    content_type: str
    bodies: Sequence[bytes]
    images: int = 1


@dataclass(frozen=True)
class Phase:
    """A load.

    Attributes:
        seconds: How long requests are sent.
        clients: Number of clients in a closed loop; 0 for an open loop.
        per_second: Arrivals in an open loop.
    """

    seconds: float
    clients: int = 0
    per_second: float = 0.0


def drive(target: Target, phase: Phase) -> dict[str, Any]:
    """Send one phase, wait for all responses, and return its summary."""
    loop = _fast_loop()
    gc.collect()
    gc.freeze()
    before = resource.getrusage(resource.RUSAGE_SELF)
    load = loop.run_until_complete(_send(target, phase))
    after = resource.getrusage(resource.RUSAGE_SELF)
    loop.close()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**summary(load, target.images), "client_cpu_s": round(cpu_s, 3)}


def summary(load: Load, images: int = 1) -> dict[str, Any]:
    """Rates, statuses and latencies of a phase with ``images`` in each request."""
    latencies = load.seconds()
    ended = max((response.due + response.seconds for response in load.responses), default=load.ended)
    seconds = max(load.ended, ended) - load.began
    found: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "requests": len(latencies),
        "statuses": dict(sorted(load.statuses.items())),
        "requests_per_s": round(len(latencies) / seconds, 1),
        "images_per_s": round(images * len(latencies) / seconds, 1),
    }
    if latencies:
        found |= {f"p{percent}_ms": round(1000 * quantile(latencies, percent / 100), 3) for percent in (50, 90, 99)}
    return found


def quantile(ordered: Sequence[float], q: float) -> float:
    """q-quantile of ascending values; infinite for none."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("inf")


async def _send(target: Target, phase: Phase) -> Load:
    generator = Generator("127.0.0.1", target.port, target.bodies, path=target.path, content_type=target.content_type)
    try:
        if phase.clients:
            return await generator.closed_loop(phase.clients, phase.seconds)
        return await generator.open_loop(phase.per_second, phase.seconds)
    finally:
        generator.close()


def _fast_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
