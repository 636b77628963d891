"""Progress of long work: one rewritten line on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

_BAR = 28


def track(items: Iterable[Item], *, total: int | None, description: str) -> Iterator[Item]:
    """Yield ``items``, reporting on stderr how many of ``total`` are done, the rate and the time left.

    A terminal gets a bar a few times a second; a file or pipe gets one line at the end and one every
    30 seconds, so logs stay readable.
    """
    terminal = sys.stderr.isatty()
    pause = 0.2 if terminal else 30.0
    began = last = time.monotonic()
    done = 0
    for item in items:
        yield item
        done += 1
        now = time.monotonic()
        if now - last >= pause:
            last = now
            _write(description, done, total, now - began, terminal)
    _write(description, done, total, time.monotonic() - began, terminal)
    if terminal:
        sys.stderr.write("\n")


def _write(description: str, done: int, total: int | None, elapsed: float, terminal: bool) -> None:
    rate = done / elapsed if elapsed > 0 else 0.0
    if total:
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        filled = _BAR * done // total
        bar = f" [{'█' * filled}{'·' * (_BAR - filled)}]" if terminal else ""
        text = f"{description}{bar} {done}/{total} ({rate:.1f}/s, {elapsed:.0f} s{left})"
    else:
        text = f"{description} {done} ({rate:.1f}/s, {elapsed:.0f} s)"
    sys.stderr.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
    sys.stderr.flush()
