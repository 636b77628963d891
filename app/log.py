"""Write predictions to the files of :mod:`psc_core.log` without holding up an answer.

::

    event loop ─ append ─▶ waiting predictions ─▶ thread: draw │ digest │ store image │ open rows ─▶ a Parquet file

Waiting predictions and open rows share one limit of bytes.  What does not fit, or cannot be written, is dropped and
counted.

The images that are logged are drawn by one number for each, so that the same request is always drawn alike.  That
number u, uniform in [0, 1), is a hash of the request's id and the image's position.  An image is in the random sample
if u is below the sample's probability, is stored if it is in the sample or u is below its decision's probability, and
gets a row if it is stored or u is below ``log_rows``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from app.inference.batcher import Images
from app.inference.decoder import EncodedImage
from app.metrics import Metrics
from app.settings import Settings
from app.tracing import begin_trace, current_trace
from psc_core.answers import BasePolicy
from psc_core.log.erase import prune
from psc_core.log.review import ReviewQueue
from psc_core.log.store import (
    IMAGE_INDEX,
    IMAGE_PATH,
    INPUT,
    REQUEST_ID,
    SHA256,
    Log,
    LoggedModel,
    arrow,
    extension_of,
    file_of,
    image_path,
    model_path,
    row_schema,
    rows_path,
)
from psc_core.model import FittedModel
from psc_core.tasks.base import BaseDecisions, FloatArray, Outputs, Task


@dataclass(frozen=True)
class Sampling:
    """The probabilities with which the images of one model are logged."""

    sample: float  # the probability of the random sample
    rows: tuple[float, ...]  # the probability of a row, by the decision's code
    images: tuple[float, ...]  # the probability that the image is stored, by the decision's code

    @classmethod
    def of(cls, settings: Settings, task: Task) -> Sampling:
        """Return the sampling that the settings ask for, for a model of this task."""
        asked, sample = settings.log_image_probabilities, settings.log_sample
        default = asked.get("abstained", 0.0)
        images = tuple(
            max(sample, asked.get(name, default if code in task.abstentions.values() else 0.0))
            for code, name in enumerate(task.decision_names())
        )
        return cls(sample, tuple(max(settings.log_rows, each) for each in images), images)


def number_of(request_id: str, image_index: int) -> float:
    """Return an image's number u."""
    digest = hashlib.blake2b(f"{request_id}/{image_index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53  # The 53 bits of a float64: with all 64, u could round up to 1.


logger = logging.getLogger("psc.log")

PRUNE_SECONDS: Final = 3600.0  # the time between two removals, seconds


def keep_pruned(log: Log, days: int, ended: threading.Event) -> None:
    """Remove rows and images older than some days, at once and every hour, up to the file at which ``ended`` is set.

    It has a thread of its own, because a bucket takes one request for each of thousands of images.
    """
    while not ended.is_set():
        try:
            prune(log, days, ended=ended)
        except OSError as error:
            logger.error("old rows and images of the prediction log cannot be removed: %s", error)
        except Exception as error:  # Even a bug must not end the thread, but it has to be logged.
            logger.error("the removal of old rows and images failed", exc_info=error)
        ended.wait(PRUNE_SECONDS)


# The columns that are filled row by row; all others come from outputs and decisions.
_FILLED: Final[tuple[str, ...]] = (
    "time", REQUEST_ID, IMAGE_INDEX, "policy", "sampled", "sample_probability", SHA256, IMAGE_PATH, "label",
)  # fmt: skip
ROW_BYTES: Final = 512  # an estimate of a row's size in memory without its outputs, bytes


class Waiting(NamedTuple):
    """The images of one request, as the event loop hands them over."""

    source: ModelLog
    time_us: int  # Microseconds since 1970, UTC.
    request_id: str
    images: Sequence[EncodedImage] | Images
    outputs: Outputs[FloatArray]
    decisions: BaseDecisions
    policy: BasePolicy
    is_monitored: bool  # Only monitored images come into the random sample.
    size: int  # An estimate of its size in memory, bytes.

    def drawn(self) -> list[tuple[int, float]]:
        """Return the indices of the images that get a row, each with its number u (:mod:`app.log`)."""
        rows, codes = self.source.sampling.rows, self.decisions.decision.tolist()
        numbers = [(index, number_of(self.request_id, index)) for index in range(len(codes))]
        return [(index, u) for (index, u), code in zip(numbers, codes, strict=True) if u < rows[code]]

    def file(self, index: int) -> tuple[bytes, str]:
        """Return an image's file as received, or a file made of its pixels, with its extension."""
        image = self.images[index]
        return (image.data, extension_of(image.data)) if isinstance(image, EncodedImage) else (file_of(image), INPUT)


class ImageToStore(NamedTuple):
    """An image that was drawn to be stored."""

    path: str
    data: bytes
    row: int  # The index of its row among the open rows.


@dataclass
class OpenRows:
    """The rows of one model and day that are not written yet."""

    source: ModelLog
    day: str
    size: int = 0  # An estimate of their size in memory, bytes.
    _cells: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _FILLED})
    _outputs: list[Outputs[FloatArray]] = field(default_factory=list)
    _codes: list[npt.NDArray[np.int8]] = field(default_factory=list)  # The codes of the decisions.

    def __len__(self) -> int:
        return len(self._cells[REQUEST_ID])

    def add(self, waiting: Waiting, drawn: Sequence[tuple[int, float]]) -> list[ImageToStore]:
        """Add the rows of the drawn images; return the images to store."""
        sampling, policy, wanted = self.source.sampling, waiting.policy.model_dump_json(), []
        outputs, decisions, at = waiting.outputs, waiting.decisions, [index for index, _ in drawn]
        if len(at) < len(outputs):
            outputs = Outputs(outputs.packed[at], outputs.scores, outputs.checks)
            decisions = decisions.at(at)
        made: list[tuple[Any, ...]] = []
        sample = sampling.sample if waiting.is_monitored else 0.0
        labels = decisions.labels(self.source.model.classes)
        for (index, u), code, label in zip(drawn, decisions.decision.tolist(), labels, strict=True):
            data, extension = waiting.file(index)
            digest = hashlib.sha256(data).hexdigest()
            if u < sampling.images[code]:
                wanted.append(ImageToStore(image_path(digest, extension), data, len(self) + len(made)))
            made.append((waiting.time_us, waiting.request_id, index, policy, u < sample, sample, digest, None, label))
        for name, cells in zip(_FILLED, zip(*made, strict=True), strict=True):
            self._cells[name].extend(cells)
        self._outputs.append(outputs)
        self._codes.append(decisions.decision)
        self.size += outputs.packed.nbytes + ROW_BYTES * len(at)
        return wanted

    def stored(self, image: ImageToStore) -> None:
        """Note in an image's row that the image is stored."""
        self._cells[IMAGE_PATH][image.row] = image.path

    def to_parquet(self) -> Any:
        """Return a buffer with the rows as a Parquet file."""
        pa = arrow()
        first, model, n = self._outputs[0], self.source.model, len(self)
        outputs = Outputs(np.concatenate([each.packed for each in self._outputs]), first.scores, first.checks)
        codes = np.concatenate(self._codes)
        cells: dict[str, Any] = {
            **self._cells,
            **{score: np.ascontiguousarray(outputs[score]) for score in outputs.scores},
            "bundle_version": [model.version] * n,
            "probabilities": _lists(outputs.probabilities) if outputs.probabilities.size else [None] * n,
            "checks": _maps(outputs),
            "decision": np.array(model.task.decision_names(), dtype=object)[codes],
            "sampling_probability": np.array(self.source.sampling.rows)[codes],
        }
        schema = row_schema(outputs.scores)
        arrays = [
            cells[each.name] if isinstance(cells[each.name], pa.Array) else pa.array(cells[each.name], each.type)
            for each in schema
        ]
        sink = pa.BufferOutputStream()
        pa.parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
        return sink.getvalue()


def day_of(time_us: int) -> str:
    """Return the day (UTC) of a time in microseconds since 1970."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d")


def _lists(values: FloatArray) -> Any:
    pa = arrow()
    return pa.ListArray.from_arrays(_offsets(values), pa.array(np.ascontiguousarray(values).ravel()))


def _maps(outputs: Outputs[FloatArray]) -> Any:
    pa, values = arrow(), outputs.check_p_values
    names = pa.array(list(outputs.checks) * len(values), pa.string())
    return pa.MapArray.from_arrays(_offsets(values), names, pa.array(np.ascontiguousarray(values).ravel()))


def _offsets(values: FloatArray) -> Any:
    rows, width = values.shape
    return arrow().array(np.arange(rows + 1, dtype=np.int32) * width)


_TURN_SECONDS: Final = 0.25  # the longest time before the thread looks at the waiting predictions again, seconds
_MAX_ROWS: Final = 50_000  # the number of open rows of a model at which they are written to a file
_QUIET_SECONDS: Final = 60.0  # the shortest time between two log lines about failed writes, seconds
_MAX_SEARCH_SECONDS: Final = 5.0
Item = TypeVar("Item")


class LogWriter:
    """Writes predictions to the log: the event loop calls :meth:`add`, and a thread does the work.

    Another thread removes old rows and images (:func:`keep_pruned`), because that may take long.
    """

    def __init__(self, log: Log, settings: Settings, metrics: Metrics) -> None:
        self.log = log
        self.review = ReviewQueue(log)
        # The longest time that a search of the log waits for this writer, and then takes, seconds; a third of the
        # deadline is left for reading the models.
        self.search_seconds = min(_MAX_SEARCH_SECONDS, settings.deadline_seconds / 3)
        self._settings = settings  # the settings, of which those named ``log_…`` matter
        self._metrics = metrics
        self._waiting: deque[Waiting] = deque()
        self._open: dict[tuple[ModelLog, str], OpenRows] = {}
        # Held bytes are the difference of two counters, each of which only one thread changes: they need no lock.
        self._taken = 0
        self._given = 0
        self._known = WeakSet[ModelLog]()  # Weak, or it would keep the description of each model that was replaced.
        self._wake = threading.Event()
        self._flushes: deque[threading.Event] = deque()
        self._closing = threading.Event()
        self._is_given_up = False
        self._flush_at = 0.0
        self._quiet_until = 0.0
        self.served: dict[str, LoggedModel] = {}  # by name; one that is served no more stays
        self._thread = threading.Thread(target=self._run, name="psc-log", daemon=True)
        self._threads = [self._thread]
        if settings.log_days is not None:
            work = partial(keep_pruned, log, settings.log_days, self._closing)
            self._threads.append(threading.Thread(target=work, name="psc-log-prune", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def log_of(self, name: str, model: FittedModel) -> ModelLog:
        """Return the log of a served model, and expose its counters at 0, because a rate needs a first value."""
        for result in ("written", "dropped"):
            self._metrics.psc_log_rows_total.labels(model=name, result=result)
            self._metrics.psc_log_images_total.labels(model=name, result=result)
        logged = LoggedModel(model.version, model.task, tuple(model.classes))
        self.served[name] = logged
        return ModelLog(self, name, logged, Sampling.of(self._settings, model.task))

    def add(self, waiting: Waiting) -> None:
        """Log the images of one request, or drop them if they do not fit in ``log_buffer_bytes``."""
        held = self._taken - self._given
        if held + waiting.size > self._settings.log_buffer_bytes or not self._thread.is_alive():
            self._count_rows(waiting.source, "dropped", len(waiting.drawn()))
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
        self._closing.set()
        self._wake.set()
        end = time.monotonic() + within_s
        # Polled, because a join would block the event loop.
        while any(each.is_alive() for each in self._threads) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if self._thread.is_alive():
            self._is_given_up = True
            logger.error("the prediction log was not written within drain_seconds; its last rows are lost")
            for waiting in _taken(self._waiting):
                self._count_rows(waiting.source, "dropped", len(waiting.drawn()))
            for key in list(self._open):
                self._end_rows(key, "dropped")

    def _run(self) -> None:
        self._flush_at = time.monotonic() + self._settings.log_flush_seconds
        while True:
            self._wake.wait(_TURN_SECONDS)
            self._wake.clear()
            # Read before the waiting predictions, so that everything added before a flush or close is written.
            closing, flushes = self._closing.is_set(), list(_taken(self._flushes))
            try:
                self._turn(closing or bool(flushes))
            except Exception as error:  # Even a bug must not end the thread, but it has to be logged.
                logger.error("the prediction log failed", exc_info=error)
            for done in flushes:
                done.set()
            if closing:
                return

    def _turn(self, flush: bool) -> None:
        # Not those that come meanwhile: where the store is slower than they are, nothing would be flushed.
        for waiting in islice(_taken(self._waiting), len(self._waiting)):
            self._add_rows(waiting)
            for key, rows in list(self._open.items()):
                if len(rows) >= _MAX_ROWS or rows.size > self._settings.log_buffer_bytes // 4:
                    self._write_rows(key)
            if not flush and time.monotonic() >= self._flush_at:
                self._wake.set()  # For the rest.
                break
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
                    result = "written" if is_stored else "dropped"
                    self._metrics.psc_log_images_total.labels(model=source.name, result=result).inc()
        finally:
            self._given += waiting.size - kept

    def _write_rows(self, key: tuple[ModelLog, str]) -> None:
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

    def _end_rows(self, key: tuple[ModelLog, str], result: str) -> None:
        """Count open rows once: :meth:`close` may give up on rows while the thread still writes them."""
        rows = self._open.pop(key, None)
        if rows is not None:
            self._count_rows(rows.source, result, len(rows))

    def _put_model(self, source: ModelLog) -> bool:
        name = model_path(source.model.version)
        with suppress(OSError):  # Where it cannot be read it may still be written.
            if source in self._known and self.log.written(name):  # The log may have been moved since.
                return True
        if is_put := self._put(name, source.model.to_json()):
            self._known.add(source)
        return is_put

    def _put(self, name: str, data: Any, *, synced: bool = True) -> bool:
        if self._is_given_up:
            return False
        try:
            self.log.put(name, data, synced=synced)
        except OSError as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + _QUIET_SECONDS
                logger.error("the prediction log cannot write: %s; see psc_log_rows_total", error)
            return False
        return True

    def _count_rows(self, source: ModelLog, result: str, number: int) -> None:
        self._metrics.psc_log_rows_total.labels(model=source.name, result=result).inc(number)


@dataclass(frozen=True, eq=False)
class ModelLog:
    """The log of one served model."""

    writer: LogWriter
    name: str  # of the model in the service
    model: LoggedModel
    sampling: Sampling

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

        Images that are not monitored are not part of the service's usual stream, and never come into the random sample.
        """
        if not isinstance(images, np.ndarray):
            images = list(images)  # A copy of files in memory that is theirs only until the answer.
        size = images.nbytes if isinstance(images, np.ndarray) else sum(len(each.data) for each in images)
        size += outputs.packed.nbytes + ROW_BYTES * len(outputs)
        trace, now = current_trace.get() or begin_trace(None), time.time_ns() // 1000
        request_id = "-".join(trace.split("-")[1:3])
        self.writer.add(Waiting(self, now, request_id, images, outputs, decisions, policy, is_monitored, size))


def _taken(queue: deque[Item]) -> Iterator[Item]:
    with suppress(IndexError):  # Tested by popping: when the service ends, another thread may pop at the same time.
        while True:
            yield queue.popleft()
