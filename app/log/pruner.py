"""The thread that removes what is too old from the log, beside the one that writes it."""

from __future__ import annotations

import logging
import threading
from typing import Final

from psc_core.log.erase import prune
from psc_core.log.store import Log

logger = logging.getLogger("psc.log")

PRUNE_SECONDS: Final = 3600.0
"""Seconds between two removals."""


class LogPruner:
    """Removes what is older than some days, at the start and every hour.

    A bucket removes thousands of images one request after the other; the log is written meanwhile.

    Args:
        log: The log.
        days: That are kept.
    """

    def __init__(self, log: Log, days: int) -> None:
        self._log = log
        self._days = days
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psc-log-prune", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Have the thread end after the file that it is at; the rest is removed another time."""
        self._ended.set()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                prune(self._log, self._days, ended=self._ended)
            except OSError as error:
                logger.error("the prediction log cannot remove what is too old: %s", error)
            except Exception as error:  # A bug must not end the removal, nor be silent.
                logger.error("the removal of what is too old failed", exc_info=error)
            self._ended.wait(PRUNE_SECONDS)
