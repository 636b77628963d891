"""Declare every Prometheus metric of the service in one table (:class:`Metrics`), and record predictions in them.

Scores and drift are of monitored images: those that the client does not ask to leave out, each counted once.  A
prediction only costs a list append; :meth:`ModelRecorder.flush` records the list in bulk, a few times a second and
before each scrape.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, metrics_core
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from app.drift import NO_DRIFT, DriftMonitor, DriftState
from psc_core.answers import BasePolicy
from psc_core.conformal import decision_p_value
from psc_core.log.labels import LABEL_KINDS
from psc_core.model import FittedModel
from psc_core.tasks.base import BaseDecisions, FloatArray, Outputs

logger = logging.getLogger("psc.server")

drift_logger = logging.getLogger("psc.drift")

_SECONDS: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_FRACTIONS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_NATS: Final = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6931, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
_LOG_DENSITY: Final = (
    -1e5, -3e4, -1e4, -3e3, -1e3, -500.0, -300.0, -200.0, -100.0, -50.0, -20.0, 0.0, 20.0, 50.0, 100.0, 200.0,
    500.0, 1e3, 1e4,
)  # fmt: skip
_IMAGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# The environment variable with the folder through which several processes share their metrics.
PROCESS_FILES: Final = "PROMETHEUS_MULTIPROC_DIR"
AnyMetric = TypeVar("AnyMetric", bound=Counter | Gauge | Histogram)


class Metric(Generic[AnyMetric]):
    """One row of the table: an attribute of :class:`Metrics`, whose name is that of the metric."""

    name: str

    def __init__(self, type: type[AnyMetric], labels: str, help: str, **options: Any) -> None:
        self.type, self.labels, self.help, self.options = type, labels.split(), help, options

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, metrics: Metrics, owner: type) -> AnyMetric:
        metric: AnyMetric = metrics.made[self.name]
        return metric


def _counter(help: str, labels: str = "model") -> Metric[Counter]:
    return Metric(Counter, labels, help)


def _gauge(help: str, labels: str = "model", *, mode: str = "livemax") -> Metric[Gauge]:
    return Metric(Gauge, labels, help, multiprocess_mode=mode)


def _histogram(help: str, labels: str = "model", *, buckets: Sequence[float] = _SECONDS) -> Metric[Histogram]:
    return Metric(Histogram, labels, help, buckets=buckets)


class Metrics:
    """The metrics of one application, in a registry of its own."""

    psc_predictions_total = _counter(
        "Images answered, by predicted label (`(other)` beyond 1,000 classes); for a regression, by its target's name.",
        "model label",
    )
    psc_ood_total = _counter("Monitored images with p ≤ `psc_alpha`, not by the alpha of a request.")
    psc_abstained_total = _counter(
        "Monitored images not accepted, by each request's own thresholds: `ood`, `ambiguous`, `uncertain`.",
        "model reason",
    )
    psc_unmonitored_images_total = _counter(
        "Images answered but left out of scores and drift: `asked` (`monitor=false`), `repeated` (seen recently).",
        "model reason",
    )
    psc_ood_p_value = _histogram("OOD p-values; uniform while nothing drifts.", buckets=_FRACTIONS)
    psc_predictive_entropy_nats = _histogram("Predictive entropies, nats.", buckets=_NATS)
    psc_log_density_nats = _histogram("Log densities of the features, nats.", buckets=_LOG_DENSITY)
    psc_batch_size = _histogram("Images per device step.", buckets=_IMAGES)
    psc_decode_seconds = _histogram("Time to decode a request, its wait for a thread included.")
    psc_queue_seconds = _histogram("Time from the end of decoding until the device takes the request.")
    psc_inference_seconds = _histogram("Time of a device step, copies included.")
    psc_request_seconds = _histogram("Time of a whole request.", "route status")
    psc_rejected_total = _counter("Requests answered with a problem, by its type.", "reason")
    psc_queue_depth = _gauge("Images admitted and not yet on the device.", mode="livesum")
    psc_queue_limit_images = _gauge("Maximum number of images admitted and not yet on the device.", mode="livesum")
    psc_inflight_requests = _gauge("Requests being answered.", "", mode="livesum")
    psc_ready = _gauge("1 if every model that was not unloaded is ready, else 0.", "", mode="livemin")
    psc_model_info = _gauge("1 for each served model.", "model version layer device")
    psc_alpha = _gauge("The policy's alpha: images with p ≤ alpha are out of distribution.")
    psc_risk = _gauge(
        "Of clear images, below the ambiguity threshold, at most this fraction is wrong, with 95 % confidence; "
        "1: nothing shows how many."
    )
    psc_reloads_total = _counter("Reloads: `ok` or `failed`.", "model result")
    psc_drift_log_martingale = _gauge("Logarithm of the conformal test martingale.")
    psc_drift_active = _gauge("1 from a drift alarm to the end of its alarm period, else 0.")
    psc_drift_alarms_total = _counter("Drift alarms, one per alarm period; see drift_false_alarm and drift_monitors.")
    psc_drift_window_ood_rate = _gauge("Fraction of the window's images with p ≤ `psc_alpha`.")
    psc_drift_window_tail_probability = _gauge(
        "Probability of at least as many OOD images in the window if all were like the calibration images.",
        mode="livemin",
    )
    psc_log_rows_total = _counter(
        "Rows of the prediction log: `written`, or `dropped` for lack of room.", "model result"
    )
    psc_log_images_total = _counter("Images to store in the prediction log: `written` or `dropped`.", "model result")
    psc_log_held_bytes = _gauge("Memory that the prediction log holds; see log_buffer_bytes.", "", mode="livesum")
    psc_feedback_total = _counter(
        f"Labels that `/feedback` wrote: {', '.join(f'`{kind}`' for kind in LABEL_KINDS)}.", "kind"
    )
    psc_gpu_memory_bytes = _gauge("GPU memory: `used`, `total`, `allocated`.", "device kind")
    psc_gpu_utilisation_ratio = _gauge(
        "Fraction of time that the GPU was busy, 0 to 1; needs the extra `gpu`.", "device"
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.made: dict[str, Any] = {
            row.name: row.type(row.name, row.help, row.labels, registry=self.registry, **row.options) for row in METRICS
        }
        ProcessCollector(registry=self.registry)

    def exposition(self) -> tuple[bytes, str]:
        """Return the text for Prometheus and its content type, for all processes if there are several."""
        registry = shared_registry() if PROCESS_FILES in os.environ else self.registry
        return generate_latest(registry), CONTENT_TYPE_LATEST


# All metrics, in the order of the documentation.
METRICS: Final[tuple[Metric[Any], ...]] = tuple(row for row in vars(Metrics).values() if isinstance(row, Metric))


class LiveProcesses(Collector):
    """The ``process_…`` metrics of several processes, each by its ``pid``, because a sum would fall when one ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[metrics_core.Metric]:
        """Yield each metric once, with a sample for each process."""
        forget_dead_processes()
        found: dict[str, metrics_core.Metric] = {}
        for pid in sorted(_pids(self._folder)):
            for family in ProcessCollector(pid=partial(str, pid), registry=None).collect():
                name = family.name
                metric = found.setdefault(name, metrics_core.Metric(name, family.documentation, family.type))
                for sample in family.samples:
                    metric.add_sample(sample.name, {"pid": str(pid)}, sample.value)
        yield from found.values()


def shared_registry() -> CollectorRegistry:
    """Return a registry with the metrics of all processes that share them."""
    registry = CollectorRegistry()
    registry.register(LiveProcesses(Path(os.environ[PROCESS_FILES])))  # First, because it forgets the dead.
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


def _pids(folder: Path) -> set[int]:
    """Return the ids of the processes that have gauges in the folder."""
    return {int(file.stem.rpartition("_")[2]) for file in folder.glob("gauge_live*_*.db")}


def forget_dead_processes() -> None:
    """Drop the gauges that dead processes have left; called when a process starts, and before they are shown."""
    if PROCESS_FILES not in os.environ:
        return
    for pid in _pids(Path(os.environ[PROCESS_FILES])):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, PermissionError):  # The latter: its number belongs to another user's process now.
            with contextlib.suppress(FileNotFoundError):  # Another new process has removed them already.
                mark_process_dead(pid)  # type: ignore[no-untyped-call]


REMEMBERED: Final = 10_000  # the number of different images whose fingerprints a monitor keeps


class RepeatFilter:
    """Tells repeats from images that count: a retry, a health probe or a demonstration says nothing new.

    docs/drift.md says why leaving out repeats is sound, where it would not be, and why it cannot be abused.

    It is made for the OOD scores of n calibration images, in any order.
    """

    def __init__(self, calibration_scores: npt.ArrayLike, *, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._recent: OrderedDict[int, None] = OrderedDict()
        scores = np.sort(np.asarray(calibration_scores))[::-1]
        equal = scores[1:] == scores[:-1]
        tied = np.zeros(len(scores), bool)
        tied[1:] |= equal
        tied[:-1] |= equal
        # Item k: whether an image lies beside equal calibration scores if k of them are no smaller than its own.
        # Either side counts, because rounding differs a little between batches of different sizes.
        self._is_common = np.concatenate([[False], tied]) | np.concatenate([tied, [False]])

    def counts(self, p_values: npt.NDArray[np.floating[Any]], fingerprints: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return whether each image counts, a boolean array of shape (images,)."""
        is_new = np.array([self._see(fingerprint) for fingerprint in fingerprints], bool)
        n = len(self._is_common) - 1
        cells = np.rint(np.asarray(p_values, np.float64) * (n + 1)).astype(np.int64) - 1
        counted: npt.NDArray[np.bool_] = is_new | self._is_common[cells.clip(0, n)]
        return counted

    def _see(self, fingerprint: int) -> bool:
        """Remember an image as the latest one; return whether it is new."""
        is_new = fingerprint not in self._recent
        self._recent[fingerprint] = None
        self._recent.move_to_end(fingerprint)
        if len(self._recent) > self._remembered:
            self._recent.popitem(last=False)
        return is_new


# The number of classes with a prediction counter of their own; all others are counted as :data:`OTHER`.
MAX_LABELS: Final = 1000
OTHER: Final = "(other)"
_FLUSH_AT: Final = 4096  # the number of recorded requests at which the list is flushed, lest it grow without bound
STEPS, STEP_SECONDS = 12, 300.0  # of the last hour


class ModelRecorder:
    """Records one model; :meth:`batch` and :meth:`decoded` may be called on any thread."""

    def __init__(
        self,
        name: str,
        model: FittedModel,
        *,
        policy: BasePolicy,
        queue_limit: int,
        metrics: Metrics,
        drift: DriftMonitor,
    ) -> None:
        self._name = name
        self._abstentions = model.task.abstentions
        labels = model.task.metric_labels(model.classes)
        self._labels = (*labels[:MAX_LABELS], *[OTHER] * (len(labels) - MAX_LABELS))
        self._outputs_of = model.outputs
        self._policy = policy
        self._ood_threshold = decision_p_value(policy.alpha, len(model.calibration.ood_scores))
        self.queue_limit = queue_limit
        self._identity = {"version": model.version, "layer": model.layer, "device": str(model.device)}
        self._metrics = metrics
        self._drift = drift
        self._repeats = RepeatFilter(model.calibration.ood_scores)
        self._hidden = False
        self._predictions: list[tuple[Outputs[FloatArray], BaseDecisions, Sequence[int] | None]] = []
        self._decisions = model.task.decision_names()
        self._recent: dict[int, list[int]] = {}  # the monitored images of each step by the code of their decision
        self._batch_size = metrics.psc_batch_size.labels(model=name)
        self._inference_seconds = metrics.psc_inference_seconds.labels(model=name)
        self._queue_seconds = metrics.psc_queue_seconds.labels(model=name)
        self._decode_seconds = metrics.psc_decode_seconds.labels(model=name)
        histograms = {
            "predictive_entropy": metrics.psc_predictive_entropy_nats,
            "log_density": metrics.psc_log_density_nats,
            "ood_p_value": metrics.psc_ood_p_value,
        }
        self._histograms = {
            score: histogram.labels(model=name) for score, histogram in histograms.items() if score in model.score_names
        }

    @property
    def drift(self) -> DriftState:
        """The state of the drift monitor, including the latest predictions."""
        self.flush()
        return self._drift.state

    def last_hour(self) -> dict[str, list[int]]:
        """Return how many monitored images got each decision in each step of the last hour, the oldest first."""
        self.flush()
        now, none = int(time.monotonic() / STEP_SECONDS), [0] * len(self._decisions)
        counts = zip(*(self._recent.get(now - ago, none) for ago in range(STEPS)[::-1]), strict=True)
        return dict(zip(self._decisions, map(list, counts), strict=True))

    def batch(self, size: int, seconds: float, waits: Sequence[float]) -> None:
        """Record a device step of ``size`` images, its time, and how long its requests had waited, seconds."""
        self._batch_size.observe(size)
        self._inference_seconds.observe(seconds)
        for wait in waits:
            self._queue_seconds.observe(wait)

    def decoded(self, seconds: float) -> None:
        """Record the time in which a request's images were decoded, seconds."""
        self._decode_seconds.observe(seconds)

    def predicted(
        self, outputs: Outputs[FloatArray], decisions: BaseDecisions, fingerprints: Sequence[int] | None
    ) -> None:
        """Record the answer to one request, on the event loop; without fingerprints, its images are not monitored."""
        self._predictions.append((outputs, decisions, fingerprints))
        if self._hidden or len(self._predictions) >= _FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Record the predictions since the last call in the metrics and the drift monitor."""
        if not self._predictions:
            return
        predictions, self._predictions = self._predictions, []
        name, metrics = self._name, self._metrics
        n_by_class = np.bincount(np.concatenate([each.label_index for _, each, _ in predictions]))
        for index in n_by_class.nonzero()[0].tolist():
            images = int(n_by_class[index])
            metrics.psc_predictions_total.labels(model=name, label=self._labels[index]).inc(images)
        asked = sum(len(outputs) for outputs, _, fingerprints in predictions if fingerprints is None)
        metrics.psc_unmonitored_images_total.labels(model=name, reason="asked").inc(asked)
        monitored = [(outputs, each, seen) for outputs, each, seen in predictions if seen is not None]
        if monitored:
            self._monitor(monitored)

    def _monitor(self, predictions: Sequence[tuple[Outputs[FloatArray], BaseDecisions, Sequence[int]]]) -> None:
        """Record the scores of several requests' images, without repeats."""
        name, metrics = self._name, self._metrics
        packed = np.concatenate([outputs.packed for outputs, _, _ in predictions])
        fingerprints = chain.from_iterable(seen for _, _, seen in predictions)
        counted = self._repeats.counts(self._outputs_of(packed)["ood_p_value"], fingerprints)
        metrics.psc_unmonitored_images_total.labels(model=name, reason="repeated").inc(int((~counted).sum()))
        scores = self._outputs_of(packed[counted])
        for score, histogram in self._histograms.items():
            for value in scores[score].tolist():
                histogram.observe(value)
        metrics.psc_ood_total.labels(model=name).inc(int((scores["ood_p_value"] <= self._ood_threshold).sum()))
        decided = np.concatenate([each.decision for _, each, _ in predictions])[counted]
        now, counts = int(time.monotonic() / STEP_SECONDS), np.bincount(decided, minlength=len(self._decisions))
        counts += self._recent.get(now, 0)
        self._recent = {now: counts.tolist()} | {at: each for at, each in self._recent.items() if 0 < now - at < STEPS}
        for reason, code in self._abstentions.items():
            metrics.psc_abstained_total.labels(model=name, reason=reason).inc(int((decided == code).sum()))
        if not self._hidden:
            self._watch_drift(scores["ood_p_value"])

    def show(self) -> None:
        """Expose the model's identity and drift, and its counters at 0, because a rate needs a first value."""
        name, metrics = self._name, self._metrics
        self._info().set(1.0)
        metrics.psc_alpha.labels(model=name).set(self._policy.alpha)
        if (rate := self._policy.largest_error_rate()) is not None:
            metrics.psc_risk.labels(model=name).set(rate)
        metrics.psc_queue_limit_images.labels(model=name).set(self.queue_limit)
        metrics.psc_ood_total.labels(model=name)
        for result in ("ok", "failed"):
            metrics.psc_reloads_total.labels(model=name, result=result)
        for reason in self._abstentions:
            metrics.psc_abstained_total.labels(model=name, reason=reason)
        for reason in ("asked", "repeated"):
            metrics.psc_unmonitored_images_total.labels(model=name, reason=reason)
        for label in set(self._labels):
            metrics.psc_predictions_total.labels(model=name, label=label)
        metrics.psc_drift_alarms_total.labels(model=name)
        self._watch_drift(np.empty(0, np.float32))

    def hide(self) -> None:
        """Expose no identity, queue or drift of the model, and record what is to come at once: nobody flushes it."""
        self._hidden = True
        self.flush()
        self._info().set(0.0)
        self._metrics.psc_queue_limit_images.labels(model=self._name).set(0)
        with contextlib.suppress(KeyError):  # Of prometheus-client 0.21, if the policy promises no rate.
            self._metrics.psc_risk.remove(self._name)
        self._show_drift(NO_DRIFT)

    def _info(self) -> Gauge:
        return self._metrics.psc_model_info.labels(model=self._name, **self._identity)

    def _watch_drift(self, p_values: npt.NDArray[np.float32]) -> None:
        name, metrics = self._name, self._metrics
        alarms, state = self._drift.update(p_values), self._drift.state
        if alarms:
            metrics.psc_drift_alarms_total.labels(model=name).inc(alarms)
            drift_logger.warning("drift alarm", extra={"model": name, "window_ood_rate": state.window_ood_rate})
        self._show_drift(state)

    def _show_drift(self, state: DriftState) -> None:
        name, metrics = self._name, self._metrics
        metrics.psc_drift_active.labels(model=name).set(state.is_active)
        metrics.psc_drift_log_martingale.labels(model=name).set(state.log_martingale)
        metrics.psc_drift_window_ood_rate.labels(model=name).set(state.window_ood_rate)
        metrics.psc_drift_window_tail_probability.labels(model=name).set(state.window_tail_probability)


def record_gpu(metrics: Metrics, device: torch.device) -> None:
    """Record a GPU's memory and utilisation; the latter needs the NVML bindings."""
    free, total = torch.cuda.mem_get_info(device)
    memory = {"used": total - free, "total": total, "allocated": torch.cuda.memory_allocated(device)}
    for kind, size in memory.items():
        metrics.psc_gpu_memory_bytes.labels(device=str(device), kind=kind).set(size)
    # Without the bindings, without the library, or on a part of a GPU: each has errors of its own.
    with contextlib.suppress(Exception):
        utilisation = torch.cuda.utilization(device) / 100.0
        metrics.psc_gpu_utilisation_ratio.labels(device=str(device)).set(utilisation)


SPARE: Final = 8  # the number of free descriptors at which a line is logged
_QUIET_SECONDS: Final = 60.0  # the shortest time between two such lines, seconds


class DescriptorWatch:
    """Watches the lowest free file descriptor; all below it are in use."""

    def __init__(self) -> None:
        self._quiet_until = time.monotonic()

    def check(self) -> None:
        """Log, at most once a minute, that only :data:`SPARE` descriptors or fewer are free; takes microseconds."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            os.close(lowest := os.open("/", os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            lowest = limit
        now = time.monotonic()
        if limit == resource.RLIM_INFINITY or lowest < limit - SPARE or now < self._quiet_until:
            return
        self._quiet_until = now + _QUIET_SECONDS
        logger.error(
            "%d of %d file descriptors are in use; without a free one, new connections are closed unanswered and "
            "reloads fail; raise the limit (ulimit -n)",
            lowest,
            limit,
        )
