"""Every Prometheus metric of the service, from one table (:data:`METRICS`) that the documentation shows.

Requests and predictions are kept as they come and booked in bulk a few times a second and before each scrape,
so one costs a few list appends.  ``python -m app.metrics`` prints the table.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector

from app.answers import Policy
from psc_core.model.decision import ABSTAIN_AMBIGUOUS, ABSTAIN_OOD, Rows, decide
from psc_core.model.pipeline import LOG_DENSITY, OOD_P_VALUE, PREDICTIVE_ENTROPY, SCORES

_SECONDS: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_SHARES: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_NATS: Final = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6931, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
_LOG_DENSITY: Final = (
    -1e5, -3e4, -1e4, -3e3, -1e3, -500.0, -300.0, -200.0, -100.0, -50.0, -20.0, 0.0, 20.0, 50.0, 100.0, 200.0,
    500.0, 1e3, 1e4,
)  # fmt: skip
_IMAGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

_BOOK_AT: Final = 4096
_PROCESS_FILES: Final = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True)
class Metric:
    """One row of the table; counters are exposed under their name, which ends in ``_total``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    across_processes: str = "livesum"


def _gauge(name: str, labels: tuple[str, ...], text: str, across: str = "livesum") -> Metric:
    return Metric(name, "gauge", labels, text, across_processes=across)


METRICS: Final = (
    Metric("psc_predictions_total", "counter", ("label",), "Images answered, by predicted label."),
    Metric("psc_ood_total", "counter", (), "Images answered with is_ood true."),
    Metric("psc_abstained_total", "counter", ("reason",), "Images not accepted: `ood` or `ambiguous`."),
    Metric("psc_ood_p_value", "histogram", (), "OOD p-values; uniform while nothing drifts.", _SHARES),
    Metric("psc_predictive_entropy_nats", "histogram", (), "Predictive entropies, nats.", _NATS),
    Metric("psc_log_density_nats", "histogram", (), "Log densities log p(z), nats.", _LOG_DENSITY),
    Metric("psc_batch_size", "histogram", (), "Images in a device step.", _IMAGES),
    Metric("psc_decode_seconds", "histogram", (), "Decoding of one request, its wait included.", _SECONDS),
    Metric("psc_queue_seconds", "histogram", (), "From decoded to taken for the device.", _SECONDS),
    Metric("psc_inference_seconds", "histogram", (), "One device step, copies included.", _SECONDS),
    Metric("psc_request_seconds", "histogram", ("route", "status"), "Whole requests.", _SECONDS),
    Metric("psc_rejected_total", "counter", ("reason",), "Requests answered with a problem, by its type."),
    _gauge("psc_queue_depth", (), "Images admitted and not yet on the device."),
    _gauge("psc_queue_limit_images", (), "Most images admitted and not yet on the device, of all models."),
    _gauge("psc_inflight_requests", (), "Requests being answered."),
    _gauge("psc_ready", (), "1 when every model is ready, else 0.", "livemin"),
    _gauge("psc_model_info", ("model", "version", "layer", "device"), "1 for each served model.", "livemax"),
    _gauge("psc_alpha", ("model",), "Images with p ≤ this are out of distribution.", "livemax"),
    Metric("psc_reloads_total", "counter", ("model", "result"), "Reloads: `ok` or `failed`."),
    _gauge("psc_drift_log_martingale", ("model",), "Log of the conformal test martingale.", "livemax"),
    Metric("psc_drift_alarms_total", "counter", ("model",), "Drift alarms; see drift_false_alarm."),
    _gauge("psc_drift_window_ood_rate", ("model",), "Share of the window with p ≤ alpha.", "livemax"),
    _gauge(
        "psc_drift_window_tail_probability",
        ("model",),
        "P(Binomial(window, alpha) ≥ OOD images in the window); tiny values mean drift.",
        "livemin",
    ),
    _gauge("psc_gpu_memory_bytes", ("device", "kind"), "Memory: `used`, `total`, `allocated`.", "livemax"),
    _gauge("psc_gpu_utilisation_ratio", ("device",), "Share of time the GPU was busy, 0 to 1.", "livemax"),
)
"""All metrics, in the order of the documentation."""


class Source(Protocol):
    """Where rows come from: a served model."""

    @property
    def classes(self) -> Sequence[str]: ...

    def watch_drift(self, p_values: npt.NDArray[np.float32]) -> None: ...


class Metrics:
    """The metrics of one application in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {row.name: _make(row, self.registry) for row in METRICS}
        self._labels: dict[str, Any] = {}
        self._requests: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self._answers: list[tuple[Source, Rows, Policy]] = []
        self._decodes: list[float] = []

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of the table."""
        metric = self._metrics[name]
        (metric.labels(**labels) if labels else metric).set(value)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter of the table."""
        metric = self._metrics[name]
        (metric.labels(**labels) if labels else metric).inc(amount)

    def rejected(self, reason: str) -> None:
        """A request was answered with a problem."""
        self.count("psc_rejected_total", reason=reason)

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered; booked later in bulk."""
        self._requests[route, status].append(seconds)

    def batch(self, size: int, seconds: float, waits: Sequence[float]) -> None:
        """A device step ended; called on the device thread."""
        self._metrics["psc_batch_size"].observe(size)
        self._metrics["psc_inference_seconds"].observe(seconds)
        observe_many(self._metrics["psc_queue_seconds"], np.asarray(waits))

    def decoded(self, seconds: float) -> None:
        """A request's images were decoded; called on any thread."""
        self._decodes.append(seconds)

    def predicted(self, source: Source, rows: Rows, policy: Policy) -> None:
        """Images were answered by ``source`` under ``policy``; booked later in bulk."""
        self._answers.append((source, rows, policy))
        if len(self._answers) >= _BOOK_AT:
            self.book()

    def book(self) -> None:
        """Bring everything kept as it came into the metrics; called on the event loop."""
        decodes, self._decodes = self._decodes, []
        observe_many(self._metrics["psc_decode_seconds"], np.asarray(decodes))
        for (route, status), seconds in self._requests.items():
            child = self._metrics["psc_request_seconds"].labels(route=route, status=str(status))
            observe_many(child, np.asarray(seconds))
        self._requests.clear()
        answers, self._answers = self._answers, []
        by_source: dict[int, list[tuple[Source, Rows, Policy]]] = defaultdict(list)
        for answer in answers:
            by_source[id(answer[0])].append(answer)
        for group in by_source.values():
            self._book(group)

    def _book(self, answers: Sequence[tuple[Source, Rows, Policy]]) -> None:
        """Book answers of one source."""
        source = answers[0][0]
        rows = np.concatenate([rows for _, rows, _ in answers])
        counts = [len(rows) for _, rows, _ in answers]
        alpha = np.repeat(np.array([policy.alpha for _, _, policy in answers], np.float32), counts)
        with np.errstate(over="ignore"):  # A request may set a threshold beyond every float32.
            threshold = np.repeat(
                np.array([policy.ambiguity_threshold for _, _, policy in answers], np.float32), counts
            )
        is_ood, decision = decide(rows, alpha, threshold)
        self._count_labels(source.classes, rows[:, SCORES:].argmax(axis=1))
        source.watch_drift(rows[:, OOD_P_VALUE])
        observe_many(self._metrics["psc_predictive_entropy_nats"], rows[:, PREDICTIVE_ENTROPY])
        observe_many(self._metrics["psc_log_density_nats"], rows[:, LOG_DENSITY])
        observe_many(self._metrics["psc_ood_p_value"], rows[:, OOD_P_VALUE])
        self._metrics["psc_ood_total"].inc(int(is_ood.sum()))
        abstained = self._metrics["psc_abstained_total"]
        for reason, code in (("ood", ABSTAIN_OOD), ("ambiguous", ABSTAIN_AMBIGUOUS)):
            abstained.labels(reason=reason).inc(int((decision == code).sum()))

    def exposition(self) -> tuple[bytes, str]:
        """The text for Prometheus and its content type; of all processes where there are several."""
        self.book()
        registry = self.registry
        if _PROCESS_FILES in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _count_labels(self, classes: Sequence[str], class_index: npt.NDArray[np.int64]) -> None:
        counts = np.bincount(class_index, minlength=len(classes))
        for index in counts.nonzero()[0].tolist():
            label = classes[index]
            child = self._labels.get(label)
            if child is None:
                child = self._metrics["psc_predictions_total"].labels(label=label)
                self._labels[label] = child
            child.inc(int(counts[index]))


def observe_many(histogram: Any, values: npt.NDArray[Any]) -> None:
    """``histogram.observe`` of every value, in a few operations.

    The bucket counters are not part of prometheus_client's public interface; a test compares the result
    with one ``observe`` a value, so that a release that changes them is noticed.
    """
    if not values.size:
        return
    buckets = np.searchsorted(np.asarray(histogram._upper_bounds), values, side="left")
    counts = np.bincount(buckets, minlength=len(histogram._upper_bounds))
    for bucket in counts.nonzero()[0].tolist():
        histogram._buckets[bucket].inc(int(counts[bucket]))
    histogram._sum.inc(float(values.sum(dtype=np.float64)))


def _make(row: Metric, registry: CollectorRegistry) -> MetricWrapperBase:
    if row.kind == "counter":
        return Counter(row.name.removesuffix("_total"), row.help, row.labels, registry=registry)
    if row.kind == "histogram":
        return Histogram(row.name, row.help, row.labels, registry=registry, buckets=row.buckets)
    mode: Any = row.across_processes
    return Gauge(row.name, row.help, row.labels, registry=registry, multiprocess_mode=mode)


def markdown_table(rows: Iterable[Metric] = METRICS) -> str:
    """The metrics table for the documentation."""
    lines = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown_table(), end="")
