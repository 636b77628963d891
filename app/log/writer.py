"""The thread that writes the log, and the predictions that wait for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakSet

import numpy as np

from app.inference.decoder import EncodedImage
from app.inference.request import Images
from app.log.pruner import LogPruner
from app.log.rows import ROW_BYTES, OpenRows, Source, Waiting, day_of
from app.log.sampling import Sampling
from app.observability.metrics import Metrics
from app.observability.tracing import begin_trace, current_trace
from app.settings import Settings
from psc_core.log.models import LoggedModel
from psc_core.log.schema import model_path, rows_path
from psc_core.log.store import Log
from psc_core.log.unreviewed import UnreviewedImages
from psc_core.model.base import FittedModel
from psc_core.tasks.decide import BaseDecisions
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy

logger = logging.getLogger("psc.log")

_TURN_SECONDS: Final = 0.25
"""The longest time before the thread looks at the waiting predictions again, seconds."""

_MAX_ROWS: Final = 50_000
"""The number of open rows of a model at which they are written to a file."""

_QUIET_SECONDS: Final = 60.0
"""The shortest time between two log lines about failed writes, seconds."""

Item = TypeVar("Item")


class LogWriter:
    """Writes predictions to the log: the event loop calls :meth:`add`, and a thread does the work.

    Another thread removes old rows and images (:class:`.LogPruner`), because that may take long.

    Args:
        log: The log.
        settings: The settings, of which those named ``log_…`` matter.
        metrics: The application's metrics.

    Attributes:
        log: The log.
        unreviewed: The logged images that nobody has reviewed.
    """

    def __init__(self, log: Log, settings: Settings, metrics: Metrics) -> None:
        self.log = log
        self.unreviewed = UnreviewedImages(log)
        self._settings = settings
        self._metrics = metrics
        self._waiting: deque[Waiting] = deque()
        self._open: dict[tuple[Source, str], OpenRows] = {}
        # Held bytes are the difference of two counters, each of which only one thread changes: they need no lock.
        self._taken = 0
        self._given = 0
        self._known = WeakSet[Source]()  # Weak, or it would keep the description of each model that was replaced.
        self._wake = threading.Event()
        self._flushes: deque[threading.Event] = deque()
        self._closing = self._is_given_up = False
        self._flush_at = 0.0
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="psc-log", daemon=True)
        self._pruner = None if settings.log_days is None else LogPruner(log, settings.log_days)

    def start(self) -> None:
        self._thread.start()
        if self._pruner is not None:
            self._pruner.start()

    def log_of(self, name: str, model: FittedModel) -> ModelLog:
        """Return the log of a served model, and expose its counters at 0, because a rate needs a first value."""
        for result in ("written", "dropped"):
            self._metrics.psc_log_rows_total.labels(model=name, result=result)
            self._metrics.psc_log_images_total.labels(model=name, result=result)
        logged = LoggedModel(model.version, model.task, tuple(model.classes))
        return ModelLog(self, Source(name, logged, Sampling.of(self._settings, model.task)))

    def add(self, waiting: Waiting) -> None:
        """Log the images of one request, or drop them if they do not fit in ``log_buffer_bytes``."""
        held = self._taken - self._given
        if held + waiting.size > self._settings.log_buffer_bytes or not self._thread.is_alive():
            self._count_dropped(waiting)
            return
        self._taken += waiting.size
        self._waiting.append(waiting)
        if held > self._settings.log_buffer_bytes // 4:
            self._wake.set()

    @property
    def held_bytes(self) -> int:
        """The size of waiting predictions and open rows, bytes."""
        return self._taken - self._given

    def flush(self, within_s: float) -> bool:
        """Write everything that was added, and return whether that was done in time; not to be called on the loop."""
        self._flushes.append(done := threading.Event())
        self._wake.set()
        return done.wait(within_s)

    async def close(self, *, within_s: float) -> None:
        """Write all predictions and end the threads; those not written within ``within_s`` seconds are dropped."""
        self._closing = True
        self._wake.set()
        threads: list[threading.Thread | LogPruner] = [self._thread]
        if self._pruner is not None:
            self._pruner.end()
            threads.append(self._pruner)
        end = time.monotonic() + within_s
        # Polled, because a join would block the event loop.
        while any(each.is_alive() for each in threads) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if self._thread.is_alive():
            self._is_given_up = True
            logger.error("the prediction log was not written within drain_seconds; its last rows are lost")
            for waiting in _taken(self._waiting):
                self._count_dropped(waiting)
            for key in list(self._open):
                self._end_rows(key, "dropped")

    def _run(self) -> None:
        self._flush_at = time.monotonic() + self._settings.log_flush_seconds
        while True:
            self._wake.wait(_TURN_SECONDS)
            self._wake.clear()
            # Read before the waiting predictions, so that everything added before a flush or close is written.
            closing, flushes = self._closing, list(_taken(self._flushes))
            try:
                self._turn(closing or bool(flushes))
            except Exception as error:  # Even a bug must not end the thread, but it has to be logged.
                logger.error("the prediction log failed", exc_info=error)
            for done in flushes:
                done.set()
            if closing:
                return

    def _turn(self, flush: bool) -> None:
        for waiting in _taken(self._waiting):
            self._add_rows(waiting)
            self._flush_full()
        now = time.monotonic()
        if flush or now >= self._flush_at:
            self._flush_at = now + self._settings.log_flush_seconds
            for key in list(self._open):
                self._write_rows(key)

    def _add_rows(self, waiting: Waiting) -> None:
        source, key, kept = waiting.source, (waiting.source, day_of(waiting.time_us)), 0
        try:
            if drawn := waiting.drawn():
                rows = self._open.get(key) or OpenRows(*key)
                before = rows.size
                images = rows.add(waiting, drawn)
                self._open[key], kept = rows, rows.size - before
                for image in images:
                    # Not synced, for speed: the digest in the file's name tells whether it is complete.
                    is_stored = self._put(image.path, image.data, synced=False)
                    if is_stored:
                        rows.stored(image)
                    self._count("images", source, "written" if is_stored else "dropped", 1)
        finally:
            self._given += waiting.size - kept

    def _flush_full(self) -> None:
        for key, rows in list(self._open.items()):
            if len(rows) >= _MAX_ROWS or rows.size > self._settings.log_buffer_bytes // 4:
                self._write_rows(key)

    def _write_rows(self, key: tuple[Source, str]) -> None:
        rows = self._open.get(key)
        if rows is None:
            return
        source, result = rows.source, "dropped"
        try:
            if self._put_model(source) and self._put(rows_path(source.name, rows.day), rows.to_parquet()):
                result = "written"
        finally:
            self._given += rows.size
            self._end_rows(key, result)

    def _end_rows(self, key: tuple[Source, str], result: str) -> None:
        """Count open rows once: :meth:`close` may give up on rows while the thread still writes them."""
        rows = self._open.pop(key, None)
        if rows is not None:
            self._count("rows", rows.source, result, len(rows))

    def _put_model(self, source: Source) -> bool:
        if source not in self._known and self._put(model_path(source.model.version), source.model.to_json()):
            self._known.add(source)
        return source in self._known

    def _put(self, name: str, data: Any, *, synced: bool = True) -> bool:
        if self._is_given_up:
            return False
        try:
            self.log.put(name, data, synced=synced)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _count_dropped(self, waiting: Waiting) -> None:
        self._count("rows", waiting.source, "dropped", len(waiting.drawn()))

    def _count(self, stored: str, source: Source, result: str, number: int) -> None:
        counter = self._metrics.psc_log_rows_total if stored == "rows" else self._metrics.psc_log_images_total
        counter.labels(model=source.name, result=result).inc(number)

    def _warn(self, error: OSError) -> None:
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            logger.error("the prediction log cannot write: %s; see psc_log_rows_total", error)


@dataclass(frozen=True)
class ModelLog:
    """The log of one served model."""

    writer: LogWriter
    source: Source

    def predicted(
        self,
        images: Sequence[EncodedImage] | Images,
        outputs: Outputs[FloatArray],
        decisions: BaseDecisions,
        policy: BasePolicy,
        *,
        is_monitored: bool,
    ) -> None:
        """Log the answered images of the current request; the event loop only appends them.

        Images that are not monitored are not part of the service's usual stream, and never come into the audit slice.
        """
        size = images.nbytes if isinstance(images, np.ndarray) else sum(len(each.data) for each in images)
        size += outputs.packed.nbytes + ROW_BYTES * len(outputs)
        trace, now = current_trace.get() or begin_trace(None), time.time_ns() // 1000
        request_id = f"{trace.trace_id}-{trace.span_id}"
        row = Waiting(self.source, now, request_id, images, outputs, decisions, policy, is_monitored, size)
        self.writer.add(row)


def _taken(queue: deque[Item]) -> Iterator[Item]:
    with suppress(IndexError):  # Tested by popping: when the service ends, another thread may pop at the same time.
        while True:
            yield queue.popleft()
