"""Log a line when file descriptors run out: without a free one, libuv silently closes new connections."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections.abc import Callable
from typing import Final

SPARE: Final = 8
"""The number of free descriptors at which a line is logged."""

_QUIET_SECONDS: Final = 60.0
"""The shortest time between two such lines, seconds."""

logger = logging.getLogger("psc.server")


class DescriptorWatch:
    """Watches the lowest free file descriptor; all below it are in use.

    Args:
        clock: Returns the time in seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = clock()

    def check(self) -> None:
        """Log, at most once a minute, that only :data:`SPARE` descriptors or fewer are free; takes microseconds."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = _lowest_free(limit)
        if limit == resource.RLIM_INFINITY or lowest < limit - SPARE or self._clock() < self._quiet_until:
            return
        self._quiet_until = self._clock() + _QUIET_SECONDS
        logger.error(
            "%d of %d file descriptors are in use; without a free one, new connections are closed unanswered and "
            "reloads fail; raise the limit (ulimit -n)",
            lowest,
            limit,
        )


def _lowest_free(limit: int) -> int:
    try:
        free = os.open("/", os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return limit
    os.close(free)
    return free
