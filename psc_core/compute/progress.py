"""Progress of a long loop on stderr: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

LOG_SECONDS: Final = 30.0
"""Shortest time between two lines in a log."""


def track(items: Iterable[Item], *, total: int, description: str) -> Iterator[Item]:
    """Yield ``items`` and report how many of ``total`` are done, how fast, and the time left.

    A file or pipe gets one line at the end and at most one every :data:`LOG_SECONDS`, without carriage returns.
    """
    if sys.stderr.isatty():
        yield from tqdm(items, desc=description, total=total, dynamic_ncols=True)
        return
    began = last = time.monotonic()
    done = 0
    for done, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) - last >= LOG_SECONDS and done < total:
            last = now
            _log(description, done, total, now - began)
    _log(description, done, total, time.monotonic() - began)


def _log(description: str, done: int, total: int, seconds: float) -> None:
    left = f", {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
    rate = done / max(seconds, 1e-9)
    print(f"{description} {done}/{total} ({rate:.1f}/s, {seconds:.0f} s{left})", file=sys.stderr, flush=True)
