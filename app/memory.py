"""Memory: one budget of bytes on which everything that clients send draws, and the limit of this process.

HTTP bodies and gRPC messages draw twice their size, for they are held as they came and as files; images that wait for
the device draw theirs, and an image draws while it is decoded.  What does not fit is refused with 429 before it is
held; only decoding waits, for other images that are being decoded.  The budget is at most a quarter of the memory that
this process may have; gRPC's messages, of which nothing is seen until they are whole, may arrive in as much again.
What else the process takes is not foreseen but seen: above nine tenths nothing more is accepted.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from app.errors import NotReady, TooManyRequests

COPIES: Final = 2
"""Bytes that are held for each byte of a body."""

PIXEL_BYTES: Final = 8
"""Bytes of a pixel while it is decoded: Pillow has four, and a copy of an image that it turns or converts."""

BUDGET_FRACTION: Final = 1 / 4
FULL_FRACTION: Final = 0.9
"""Fractions of the memory that a process may have: for its budget, and from where it accepts nothing more."""

RELEASE_BYTES: Final = 128 << 20
_RELEASE_SECONDS: Final = 5.0
"""So much less than before is held, and so long after the last time, when freed memory is returned to the system."""

CGROUPS: Final = Path("/sys/fs/cgroup")
_VERSION_1: Final = "memory/{}/memory.limit_in_bytes", "memory/{}/memory.usage_in_bytes"
_VERSION_2: Final = "{}/memory.max", "{}/memory.current"
_PAGE_CACHE: Final = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
"""A line of ``memory.stat``; version 1 has another one for the group without those below it, which comes first."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def limits() -> list[tuple[int, int]]:
    """Limit and use of memory, bytes, of this machine and of each control group (version 1 or 2) around this process.

    A container sees its own group as the root, or its path from outside, which is not there, below that root.  Files
    that a group has read count as its use until the kernel needs the room; those not read again lately are left out,
    as Kubernetes and Docker do.
    """
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    machine = {words[0]: int(words[1]) << 10 for words in lines}
    found = [(machine["MemTotal:"], machine["MemTotal:"] - machine["MemAvailable:"])]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        files = _VERSION_2 if number == "0" else _VERSION_1
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            with suppress(OSError, ValueError):  # No such group, or "max".
                limit, used = (int((CGROUPS / file.format(folder)).read_text()) for file in files)
                found.append((limit, max(0, used - _page_cache(CGROUPS / files[1].format(folder)))))
    return found


def _page_cache(usage: Path) -> int:
    """Bytes of the group of a file of usage that the kernel takes back first."""
    try:
        found = _PAGE_CACHE.findall(usage.with_name("memory.stat").read_text())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


class MemoryBudget:
    """The bytes that requests may hold at once, and whether the process has memory left.  Any thread may call.

    Args:
        asked: The budget, where the process may have four times as much.
        processes: Processes that share the limits.
        max_pixels: Pixels of the largest image: so much is left for decoding, whatever else is held, or half of the
            budget.

    Attributes:
        total: The budget, bytes.
        process_bytes: The memory that this process may have.
        held: Bytes held now.
        shortage: Why nothing more is accepted; empty while there is memory.
    """

    def __init__(self, asked: int, *, processes: int, max_pixels: int) -> None:
        self.process_bytes = min(limit for limit, _ in limits()) // processes
        self.total = min(asked, int(BUDGET_FRACTION * self.process_bytes))
        self.shortage = ""
        self._for_decoding = min(PIXEL_BYTES * max_pixels, self.total // 2)
        self.held = self._most_held = 0
        self._released_at = time.monotonic()
        self._condition = threading.Condition(threading.Lock())

    @property
    def largest_body(self) -> int:
        """The longest body that there is ever room for, bytes."""
        return (self.total - self._for_decoding) // COPIES

    def check(self, size: int) -> None:
        """Look whether so many bytes more could be held now.

        Raises:
            TooManyRequests: There is no room.
            NotReady: The process has too little memory left.
        """
        if self.shortage:
            raise NotReady(self.shortage)
        if self.held + size > self.total - self._for_decoding:
            raise TooManyRequests(
                f"requests hold {self.held} of {self.total} bytes (max_buffered_bytes, or a quarter of the memory), of "
                f"which {self._for_decoding} are for decoding; there is no room for {size} more; try again in 1 s",
                retry_after=1,
            )

    def take(self, size: int) -> None:
        """Hold so many bytes more, until they are given back; raises as :meth:`check`."""
        with self._condition:
            self.check(size)
            self._hold(size)

    def give(self, size: int) -> None:
        """Give back what was taken."""
        with self._condition:
            self.held -= size
            self._condition.notify_all()

    @contextmanager
    def decoding(self, pixels: int) -> Iterator[None]:
        """Hold the memory of an image that is decoded within the block; waits for others that are being decoded."""
        size = min(PIXEL_BYTES * pixels, self._for_decoding)
        with self._condition:
            self._condition.wait_for(lambda: self.held + size <= self.total)
            self._hold(size)
        try:
            yield
        finally:
            self.give(size)

    def should_release(self) -> bool:
        """Look at the process's memory; return whether freed memory should be returned to the system now."""
        used = _PAGE_BYTES * int(Path("/proc/self/statm").read_text().split()[1])
        self.shortage = (
            f"the process takes {used >> 20} MiB of memory and may have {self.process_bytes >> 20}; try again, or "
            "raise the container's limit"
            if used > FULL_FRACTION * self.process_bytes
            else ""
        )
        now = time.monotonic()
        is_less = self._most_held - self.held >= RELEASE_BYTES
        if not (is_less or self.shortage) or now < self._released_at + _RELEASE_SECONDS:
            return False
        self._released_at, self._most_held = now, self.held
        return True

    def _hold(self, size: int) -> None:
        self.held += size
        self._most_held = max(self._most_held, self.held)
