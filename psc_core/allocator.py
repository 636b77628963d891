"""Configure the C library's allocator and OpenMP for a process that computes the same for every batch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8
_NEVER: Final = 2**31 - 1


def let_waiting_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait for each other; to be called before torch is imported, which reads it.

    By default they wait in a loop: idle ones take the cores that decode images, and where another process is busy,
    small operations such as those of a head's fit take ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_freed_memory() -> None:
    """Keep the memory that a batch frees for the next batch.

    By default glibc returns large blocks to the system when they are freed, so the next batch takes a page fault for
    every page.  All threads share one arena, because other arenas cannot hold blocks of 64 MiB and more.  The process
    keeps the memory of its largest batch.  Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_ARENA_MAX, 1)


def release_freed_memory() -> None:
    """Return free memory to the system once, although :func:`keep_freed_memory` keeps it."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
