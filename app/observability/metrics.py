"""Every Prometheus metric of the service, from one table (:data:`METRICS`) that the documentation shows."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_SECONDS: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_FRACTIONS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_NATS: Final = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6931, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
_LOG_DENSITY: Final = (
    -1e5, -3e4, -1e4, -3e3, -1e3, -500.0, -300.0, -200.0, -100.0, -50.0, -20.0, 0.0, 20.0, 50.0, 100.0, 200.0,
    500.0, 1e3, 1e4,
)  # fmt: skip
_IMAGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

PROCESS_FILES: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that names the folder through which several processes share their metrics."""


@dataclass(frozen=True)
class Metric:
    """One row of the table; counters are exposed under their name, which ends in ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    across_processes: str = "livesum"
    """How a gauge is combined."""


def _gauge(name: str, labels: tuple[str, ...], text: str, across: str = "livesum") -> Metric:
    return Metric(name, "gauge", labels, text, across_processes=across)


METRICS: Final = (
    Metric("psc_predictions_total", "counter", ("model", "label"), "Images answered, by predicted label."),
    Metric("psc_ood_total", "counter", ("model",), "Images answered with is_ood true."),
    Metric("psc_abstained_total", "counter", ("model", "reason"), "Images not accepted: `ood` or `ambiguous`."),
    Metric("psc_ood_p_value", "histogram", ("model",), "OOD p-values; uniform while nothing drifts.", _FRACTIONS),
    Metric("psc_predictive_entropy_nats", "histogram", ("model",), "Predictive entropies, nats.", _NATS),
    Metric("psc_log_density_nats", "histogram", ("model",), "Log densities log p(z), nats.", _LOG_DENSITY),
    Metric("psc_batch_size", "histogram", ("model",), "Images in a device step.", _IMAGES),
    Metric("psc_decode_seconds", "histogram", ("model",), "Decoding of one request, its wait included.", _SECONDS),
    Metric("psc_queue_seconds", "histogram", ("model",), "From decoded to taken for the device.", _SECONDS),
    Metric("psc_inference_seconds", "histogram", ("model",), "One device step, copies included.", _SECONDS),
    Metric("psc_request_seconds", "histogram", ("route", "status"), "Whole requests.", _SECONDS),
    Metric("psc_rejected_total", "counter", ("reason",), "Requests answered with a problem, by its type."),
    _gauge("psc_queue_depth", ("model",), "Images admitted and not yet on the device."),
    _gauge("psc_queue_limit_images", ("model",), "Maximum number of images admitted and not yet on the device."),
    _gauge("psc_inflight_requests", (), "Requests being answered."),
    _gauge("psc_ready", (), "1 when every model is ready, else 0.", "livemin"),
    _gauge("psc_model_info", ("model", "version", "layer", "device"), "1 for each served model.", "livemax"),
    _gauge("psc_alpha", ("model",), "Images with p ≤ this are out of distribution.", "livemax"),
    Metric("psc_reloads_total", "counter", ("model", "result"), "Reloads: `ok` or `failed`."),
    _gauge("psc_drift_log_martingale", ("model",), "Log of the conformal test martingale.", "livemax"),
    Metric("psc_drift_alarms_total", "counter", ("model",), "Drift alarms; see drift_false_alarm and drift_monitors."),
    _gauge("psc_drift_window_ood_rate", ("model",), "Fraction of the window with p ≤ alpha.", "livemax"),
    _gauge(
        "psc_drift_window_tail_probability",
        ("model",),
        "P(Binomial(window, alpha) ≥ OOD images in the window); tiny values mean drift.",
        "livemin",
    ),
    _gauge("psc_gpu_memory_bytes", ("device", "kind"), "Memory: `used`, `total`, `allocated`.", "livemax"),
    _gauge("psc_gpu_utilisation_ratio", ("device",), "Fraction of time the GPU was busy, 0 to 1.", "livemax"),
)
"""All metrics, in the order of the documentation."""


class Metrics:
    """The metrics of one application in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {row.name: _make(row, self.registry) for row in METRICS}

    def get(self, name: str, **labels: str) -> Any:
        """A metric of the table: a counter, gauge or histogram of prometheus-client, with its labels applied."""
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric

    def exposition(self) -> tuple[bytes, str]:
        """The text for Prometheus and its content type; of all processes where there are several."""
        registry = self.registry
        if PROCESS_FILES in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST


def forget_dead_processes() -> None:
    """Drop the gauges that processes left which are gone; call it when a process starts."""
    if PROCESS_FILES not in os.environ:
        return
    for file in Path(os.environ[PROCESS_FILES]).glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            with contextlib.suppress(FileNotFoundError):  # Another new process was faster.
                mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _make(row: Metric, registry: CollectorRegistry) -> MetricWrapperBase:
    if row.kind == "counter":
        return Counter(row.name.removesuffix("_total"), row.help, row.labels, registry=registry)
    if row.kind == "histogram":
        return Histogram(row.name, row.help, row.labels, registry=registry, buckets=row.buckets)
    mode: Any = row.across_processes
    return Gauge(row.name, row.help, row.labels, registry=registry, multiprocess_mode=mode)
