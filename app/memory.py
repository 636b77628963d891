"""Limit memory: one budget of bytes for everything that clients send, and a ceiling for the whole process.

HTTP bodies and gRPC messages take twice their size from the budget, because they are held both as received and as
files.  Decoded images take their size while they wait for the device, and an image takes some while it is decoded.
A request that does not fit is refused with 429 before it is held; only decoding waits, for other images to be decoded.
The budget is at most a quarter of the memory that this process may have.  gRPC shows nothing of a message until it is
complete, so messages that are still arriving may take as much again.  Other uses of memory cannot be foreseen, only
measured: above nine tenths of its memory the process accepts no more requests, nor any that would take it there.
"""

from __future__ import annotations

import os
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from app.errors import NotReady, TooManyRequests

COPIES: Final = 2  # the bytes held for each byte of a body
PIXEL_BYTES: Final = 8  # of a pixel, for which the budget keeps room to decode an image
BUDGET_FRACTION: Final = 1 / 4  # the budget, as a fraction of the memory that the process may have
FULL_FRACTION: Final = 0.9  # the fraction of its memory above which the process accepts no more requests
_IDLE_BYTES: Final = 1 << 20  # what requests may hold while the memory of an idle process is measured
RELEASE_BYTES: Final = 128 << 20  # below their peak, what requests hold for freed memory to go back to the system
_RELEASE_SECONDS: Final = 5.0  # the shortest time between two such returns
CGROUPS: Final = Path("/sys/fs/cgroup")
_VERSION_1: Final = "memory/{}/memory.limit_in_bytes", "memory/{}/memory.usage_in_bytes"
_VERSION_2: Final = "{}/memory.max", "{}/memory.current"
# The page cache in ``memory.stat``. Version 1 has two such lines; the first leaves out the groups below this one.
_PAGE_CACHE: Final = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def limits() -> list[tuple[int, int]]:
    """Return (limit, use) in bytes for this machine and for each control group (version 1 or 2) around this process.

    Inside a container, ``/proc/self/cgroup`` may give the path that the host sees, which does not exist here; the
    container's own group is then the root.  The kernel counts files that a group has read as its use until it needs
    the room; those not read lately are left out, as Kubernetes and Docker do.
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
            with suppress(OSError, ValueError):  # There is no such group, or its limit is "max".
                limit, used = (int((CGROUPS / file.format(folder)).read_text()) for file in files)
                found.append((limit, max(0, used - _page_cache(CGROUPS / files[1].format(folder)))))
    return found


def _page_cache(usage: Path) -> int:
    """Return the bytes of page cache that the kernel takes back first, from the group with this usage file."""
    try:
        found = _PAGE_CACHE.findall(usage.with_name("memory.stat").read_text())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


def process_memory() -> int:
    """Return the memory that this process may have, bytes."""
    return min(limit for limit, _ in limits())


def resident_bytes() -> int:
    """Return the memory that this process holds, bytes."""
    return _PAGE_BYTES * int(Path("/proc/self/statm").read_text().split()[1])


class MemoryBudget:
    """The bytes that requests may hold at once, and whether the process has memory left.  Any thread may call.

    Room to decode one image of ``max_pixels`` is always kept free, but at most half of the budget.  Processes that
    have their memory together share ``counts``: what requests hold in each of them, and last what they may hold in all.
    """

    def __init__(
        self,
        asked: int,
        process_bytes: int,
        *,
        max_pixels: int,
        counts: memoryview | None = None,
        place: int = 0,
    ) -> None:
        self.process_bytes = process_bytes  # the memory that this process may have, bytes; see :func:`process_memory`
        self.total = min(asked, int(BUDGET_FRACTION * process_bytes))
        self.shortage = ""  # the reason why no more requests are accepted; empty while there is memory
        self._for_decoding = min(PIXEL_BYTES * max_pixels, self.total // 2)
        self._counts = memoryview(array("q", [0, process_bytes])) if counts is None else counts
        self._place = place  # of this process among the counts
        self._most_held = self._idle_bytes = 0
        self._decoded = 0  # the part of the budget for images that are being decoded
        self._beyond = 0  # what they take beyond that
        self._line = deque[object]()  # the images that wait for room, the first one first
        self._released_at = time.monotonic()
        self._condition = threading.Condition(threading.Lock())

    @property
    def held(self) -> int:
        """What requests hold in this process now, bytes."""
        return self._counts[self._place]

    @property
    def _budgeted(self) -> int:
        return self.held - self._beyond

    @property
    def largest_body(self) -> int:
        """The longest body that ever fits, bytes."""
        return (self.total - self._for_decoding) // COPIES

    def check(self, size: int) -> None:
        """Check that ``size`` more bytes could be held now."""
        self._check_left(size)
        # What is decoded in the room that is kept for it takes none from bodies.
        if self._budgeted - min(self._decoded, self._for_decoding) + size > self.total - self._for_decoding:
            raise TooManyRequests(
                f"requests hold {self._budgeted} of {self.total} bytes (max_buffered_bytes, or a quarter of memory); "
                f"{self._for_decoding} of these are reserved for decoding; {size} more do not fit; try again in 1 s",
                retry_after=1,
            )

    def take(self, size: int) -> None:
        """Hold ``size`` more bytes until :meth:`give`; raises the errors of :meth:`check`."""
        with self._condition:
            self.check(size)
            self._hold(size)

    def give(self, size: int) -> None:
        """Give back ``size`` bytes that were taken."""
        with self._condition:
            self._give(size)

    @contextmanager
    def decoding(self, size: int) -> Iterator[None]:
        """Hold the bytes that decoding an image takes within the block; waits until other images are decoded.

        Raises :class:`NotReady` for an image that would take more than the process has left.
        """
        budgeted = min(size, self._for_decoding)  # Never more than is kept free, or an image could wait for ever.
        place = object()

        def has_room() -> bool:
            """Return whether there is room, for a second image without refusing the bodies of others meanwhile."""
            rest = self.total - (self._for_decoding if self._decoded else 0)
            return self._line[0] is place and self._budgeted + budgeted <= rest

        with self._condition:
            self._line.append(place)
            try:
                self._condition.wait_for(has_room)
                self._check_left(size)
                self._decoded += budgeted
                self._beyond += size - budgeted
                self._hold(size)
            finally:
                self._line.remove(place)
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._decoded -= budgeted
                self._beyond -= size - budgeted
                self._give(size)

    def should_release(self, elsewhere: int = 0) -> bool:
        """Measure the process's memory; return whether its freed memory should go back to the system now.

        ``elsewhere`` are the bytes that other processes hold for it.
        """
        try:
            used = resident_bytes() + elsewhere
        except OSError:  # No file descriptor is free, so the last measure stands.
            return False
        full, held = int(FULL_FRACTION * self.process_bytes), sum(self._counts[:-1])
        if held <= _IDLE_BYTES:
            self._idle_bytes = used
        # What a request is about to hold is not in use yet, so that an idle process is what counts.
        self._counts[-1] = full - max(self._idle_bytes, used - held)
        self.shortage = (
            f"the process uses {used >> 20} of its {self.process_bytes >> 20} MiB of memory; try again, or raise the "
            "container's limit"
            if used > full
            else ""
        )
        now = time.monotonic()
        is_less = self._most_held - self.held >= RELEASE_BYTES
        is_tight = self._counts[-1] < RELEASE_BYTES  # Or what is freed and kept would be refused to requests for ever.
        if not (is_less or is_tight) or now < self._released_at + _RELEASE_SECONDS:
            return False
        self._released_at, self._most_held = now, self.held
        return True

    def _check_left(self, size: int) -> None:
        """Check that ``size`` more bytes would leave the process a tenth of its memory, as last measured."""
        if self.shortage:
            raise NotReady(self.shortage)
        left = self._counts[-1] - sum(self._counts[:-1])
        if size > left:
            raise NotReady(
                f"the service may take {max(0, left) >> 20} MiB more of its memory, and this takes {size >> 20} MiB; "
                "try again, or raise the container's limit"
            )

    def _give(self, size: int) -> None:
        self._counts[self._place] -= size
        self._condition.notify_all()

    def _hold(self, size: int) -> None:
        self._counts[self._place] += size
        self._most_held = max(self._most_held, self.held)
