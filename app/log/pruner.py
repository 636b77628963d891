"""Remove old rows and images from the log, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from typing import Final

from psc_core.log.erase import prune
from psc_core.log.store import Log

logger = logging.getLogger("psc.log")

PRUNE_SECONDS: Final = 3600.0
"""The time between two removals, seconds."""


class LogPruner:
    """A thread that removes rows and images older than some days, at the start and every hour.

    It is not the writer's thread, because a bucket takes one request for each of thousands of images.

    Args:
        log: The log.
        days: The number of days to keep.
    """

    def __init__(self, log: Log, days: int) -> None:
        self._log = log
        self._days = days
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psc-log-prune", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end after the file it is removing; a later start removes the rest."""
        self._ended.set()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                prune(self._log, self._days, ended=self._ended)
            except OSError as error:
                logger.error("old rows and images of the prediction log cannot be removed: %s", error)
            except Exception as error:  # Even a bug must not end the thread, but it has to be logged.
                logger.error("the removal of old rows and images failed", exc_info=error)
            self._ended.wait(PRUNE_SECONDS)
