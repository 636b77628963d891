"""Record predictions, batches and decoding times in metrics, and p-values in drift monitors.

Scores and drift are of monitored images: those that the client does not ask to leave out, each counted once.

A prediction only costs a list append.  :meth:`ModelRecorder.flush` records the list in bulk, a few times a second and
before each scrape.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
from prometheus_client import Gauge

from app.observability.drift import DriftMonitor, DriftState
from app.observability.metrics import Metrics, RepeatFilter
from app.tasks.base import served_task
from psc_core.conformal import decision_p_value
from psc_core.model import FittedModel
from psc_core.tasks.decide import BaseDecisions
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy

logger = logging.getLogger("psc.drift")

# The number of classes with a prediction counter of their own; all others are counted as :data:`OTHER`.
MAX_LABELS: Final = 1000

OTHER: Final = "(other)"

_FLUSH_AT: Final = 4096  # the number of recorded requests at which the list is flushed, lest it grow without bound


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
        self._name = name  # the name of the served model
        self._task = served_task(model.task)
        self._abstentions = model.task.abstentions
        labels = self._task.metric_labels(model.classes)
        self._labels = (*labels[:MAX_LABELS], *[OTHER] * (len(labels) - MAX_LABELS))
        self._outputs_of = model.outputs
        self._policy = policy  # the thresholds of requests that set none
        self._ood_threshold = decision_p_value(policy.alpha, len(model.calibration.ood_scores))
        self.queue_limit = queue_limit  # the maximum number of images in the model's queue
        self._identity = {"version": model.version, "layer": model.layer, "device": str(model.device)}
        self._metrics = metrics  # the application's metrics
        self._drift = drift  # the monitor of the model's p-values
        self._repeats = RepeatFilter.of(model.calibration.ood_scores)
        self._hidden = False
        self._predictions: list[tuple[Outputs[FloatArray], BaseDecisions, Sequence[int] | None]] = []
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
        n_by_class = np.bincount(np.concatenate([self._task.label_index(each) for _, each, _ in predictions]))
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
        """Stop exposing the model's identity and drift, and record what is still to come at once: nobody flushes it."""
        self._hidden = True
        self.flush()
        self._info().set(0.0)

    def _info(self) -> Gauge:
        return self._metrics.psc_model_info.labels(model=self._name, **self._identity)

    def _watch_drift(self, p_values: npt.NDArray[np.float32]) -> None:
        name, metrics = self._name, self._metrics
        alarms, state = self._drift.update(p_values), self._drift.state
        if alarms:
            metrics.psc_drift_alarms_total.labels(model=name).inc(alarms)
            logger.warning("drift alarm", extra={"model": name, "window_ood_rate": state.window_ood_rate})
        metrics.psc_drift_active.labels(model=name).set(state.is_active)
        metrics.psc_drift_log_martingale.labels(model=name).set(state.log_martingale)
        metrics.psc_drift_window_ood_rate.labels(model=name).set(state.window_ood_rate)
        metrics.psc_drift_window_tail_probability.labels(model=name).set(state.window_tail_probability)
