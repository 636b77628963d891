"""The served models by name: loading, warming, and swapping one for another without losing a request.

A reload builds everything beside the old model (read, verify, build, warm up), swaps one reference, and then
lets the old engine finish what it admitted.  A bundle that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.answers import Policy, dump, predictions_json
from app.decoding import Decoder
from app.drift import DriftMonitor
from app.engine import Answer, Engine, Limits, Phase
from app.errors import NotReady, ReloadRunning, UnattainableAlpha, UnknownModel
from app.metrics import Metrics
from app.model import Model, ModelPreprocess
from app.settings import Settings
from app.step import make_step
from psc_core.errors import BundleError, DeviceError, PSCError, UsageError
from psc_core.model.decision import Rows, Verdict, judge

logger = logging.getLogger("psc.registry")

MOST_LABELS_SHOWN = 1000
"""Classes whose prediction counter is shown before their first prediction."""


Loader = Callable[[Path], Model]


@dataclass(frozen=True)
class Served:
    """One model in service.

    Attributes:
        name: Under which it is served.
        model: The fitted model.
        engine: Its queue and device thread.
        policy: Thresholds when the request sets none.
        set_thresholds: (K,) of the prediction sets.
        drift: Monitor of its p-values.
        metrics: Where answers are counted.
        labels: Classes as JSON.
    """

    name: str
    model: Model
    engine: Engine
    policy: Policy
    set_thresholds: Any
    drift: DriftMonitor
    metrics: Metrics
    labels: tuple[bytes, ...]

    @property
    def version(self) -> str:
        """Digest of its bundle."""
        return self.model.version

    @property
    def layer(self) -> str:
        """Candidate layer(s)."""
        return self.model.layer

    @property
    def classes(self) -> tuple[str, ...]:
        """Labels by class index."""
        return self.model.classes

    @property
    def preprocess(self) -> ModelPreprocess:
        """Host half of the preprocessing."""
        return self.model.preprocess

    def judge(self, rows: Rows, policy: Policy | None = None) -> Verdict:
        """Rows to verdicts under ``policy`` (default: the model's)."""
        policy = policy or self.policy
        return judge(rows, self.set_thresholds, alpha=policy.alpha, ambiguity_threshold=policy.ambiguity_threshold)

    def with_thresholds(self, alpha: float | None, ambiguity_threshold: float | None) -> Policy:
        """The policy with a request's own thresholds.

        Raises:
            UnattainableAlpha: The calibration images cannot promise this alpha.
        """
        if alpha is None and ambiguity_threshold is None:
            return self.policy
        if alpha is not None:
            try:
                self.model.calibration.ood_score_threshold(alpha)
            except UsageError as error:
                raise UnattainableAlpha(str(error)) from error
        return Policy(
            alpha=self.policy.alpha if alpha is None else alpha,
            ambiguity_threshold=(
                self.policy.ambiguity_threshold if ambiguity_threshold is None else ambiguity_threshold
            ),
            coverage=self.policy.coverage,
        )

    def predictions(self, answer: Answer) -> Sequence[bytes]:
        """JSON of each image's prediction under the model's own policy, made once for all that ran together."""
        block = answer.block
        if block.made is None:
            block.made = predictions_json(block.rows, self.judge(block.rows), self.labels)
        made: Sequence[bytes] = block.made
        return made[answer.start : answer.start + answer.size]

    def document(self, predictions: Sequence[bytes], policy: Policy) -> bytes:
        """The JSON answer to a request."""
        head = self._head if policy is self.policy else self._head_of(policy)
        return head + b",".join(predictions) + b"]}"

    @cached_property
    def _head(self) -> bytes:
        return self._head_of(self.policy)

    def _head_of(self, policy: Policy) -> bytes:
        model = {"name": self.name, "version": self.version, "layer": self.layer}
        return b'{"model":%b,"policy":%b,"predictions":[' % (dump(model), dump(policy._asdict()))

    def record(self, rows: Rows, policy: Policy | None = None) -> None:
        """Count answered images, under ``policy`` (default: the model's), in the metrics and for drift."""
        self.metrics.predicted(self, rows, policy or self.policy)

    def watch_drift(self, p_values: Any) -> None:
        """Feed p-values to the drift monitor and show its state."""
        alarms = self.drift.update(p_values)
        state, metrics, name = self.drift.state, self.metrics, self.name
        if alarms:
            metrics.count("psc_drift_alarms_total", alarms, model=name)
            logger.warning("drift alarm", extra={"model": name, "window_ood_rate": state.window_ood_rate})
        metrics.gauge("psc_drift_log_martingale", state.log_martingale, model=name)
        metrics.gauge("psc_drift_window_ood_rate", state.window_ood_rate, model=name)
        metrics.gauge("psc_drift_window_tail_probability", state.window_tail_probability, model=name)

    def show(self) -> None:
        """Put its identity, its drift so far and its counters, at 0, into the metrics: a rate needs a first value."""
        self._info(1.0)
        for reason in ("ood", "ambiguous"):
            self.metrics.count("psc_abstained_total", 0.0, reason=reason)
        for label in self.classes[:MOST_LABELS_SHOWN]:
            self.metrics.count("psc_predictions_total", 0.0, label=label)
        self.metrics.count("psc_drift_alarms_total", 0.0, model=self.name)
        self.watch_drift(np.empty(0))
        self.metrics.gauge("psc_alpha", self.policy.alpha, model=self.name)

    def hide(self) -> None:
        """Take it out again."""
        self._info(0.0)

    def _info(self, value: float) -> None:
        self.metrics.gauge(
            "psc_model_info",
            value,
            model=self.name,
            version=self.version,
            layer=self.layer,
            device=str(self.model.device),
        )


class Registry:
    """The models by name; use it on the event loop only.

    Args:
        settings: Of the service.
        metrics: Of the service.
        loader: Reads a bundle directory; called on a thread.
        models: Served by name instead of the settings' bundles; a reload serves them again.
        on_failure: Called on the event loop when a model's device is dead.

    Attributes:
        on_retired: Called on the event loop when the models that a reload replaced have ended.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        loader: Loader,
        models: Mapping[str, Model] | None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loader = loader
        self._on_failure = on_failure
        self._served: dict[str, Served] = {}
        self._paths = dict(settings.named_bundles)
        self._given = models
        self._names = tuple(self._paths if models is None else models)
        self._reloading = asyncio.Lock()
        self._awaited = False
        self._draining = False
        self._retiring: set[asyncio.Task[None]] = set()
        self.on_retired: Callable[[], None] = lambda: None
        self._usual_threads = torch.get_num_threads()
        threads = settings.decode_threads or _default_threads()
        self._decode_threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="psc-decode")
        metrics.gauge("psc_queue_limit_images", settings.max_queue_images * len(self._names))

    @property
    def names(self) -> tuple[str, ...]:
        """Model names, the default first."""
        return self._names

    @property
    def served(self) -> tuple[Served, ...]:
        """The models in service."""
        return tuple(self._served.values())

    @property
    def pending(self) -> int:
        """Images admitted and not yet on a device."""
        return sum(served.engine.pending for served in self._served.values())

    def get(self, name: str | None = None) -> Served:
        """A model, the default one for ``None``.

        Raises:
            UnknownModel: No model of this name.
            NotReady: It is still loading, or the service is draining.
        """
        if name is None and self._names:
            name = self._names[0]
        served = self._served.get(name or "")
        if served is not None:
            return served
        if name not in self._names:
            raise UnknownModel(f"expected one of {', '.join(self._names)}, got {name!r}; see /v2 or /model")
        raise NotReady(f"model {name!r} is loading; try again in a few seconds")

    def reasons(self) -> dict[str, str]:
        """Why predictions are not answered now, by model; empty when ready."""
        reasons = {name: "loading" for name in self._names if name not in self._served}
        for name, served in self._served.items():
            if served.engine.phase is not Phase.READY:
                reasons[name] = served.engine.phase.value
        if self._draining:
            reasons["service"] = "draining"
        return reasons

    async def start(self) -> None:
        """Load and warm up every model.

        Raises:
            PSCError: A bundle cannot be used, or its network failed at warm-up.
        """
        for name in self._names:
            began = time.perf_counter()
            model = await self._load(name)
            self._swap(await self._prepare(name, model))
            seconds = round(time.perf_counter() - began, 3)
            extra = {"model": name, "version": model.version, "device": str(model.device), "seconds": seconds}
            logger.info("model ready", extra=extra)

    async def reload(self, name: str | None = None) -> list[tuple[str, str, str]]:
        """Load bundles again, all or one of them, and swap.

        Returns:
            (name, version before, version now) of each.

        Raises:
            UnknownModel: No model of this name.
            NotReady: It is still loading for the first time.
            ReloadRunning: Another reload is running.
            BundleError: A bundle cannot be used; no model was changed.
            DeviceError: The new network failed at warm-up; no model was changed.
        """
        names = self._names if name is None else (self.get(name).name,)
        for each in names:
            self.get(each)
        if self._reloading.locked():
            raise ReloadRunning("expected no other reload, one is running; try again when it is done")
        fresh: list[Served] = []
        async with self._reloading:
            try:
                for each in names:
                    fresh.append(await self._prepare(each, await self._load(each)))
            except BaseException as error:
                for served in fresh:
                    await served.engine.close(within_s=0)
                for each in names:
                    self._metrics.count("psc_reloads_total", model=each, result="failed")
                if isinstance(error, PSCError) or not isinstance(error, Exception):
                    raise
                logger.exception("a model could not be loaded")
                raise DeviceError(f"a model could not be loaded ({type(error).__name__}); the old ones stay") from error
        changes = []
        for served in fresh:
            changes.append((served.name, self._served[served.name].version, served.version))
            self._swap(served)
            self._metrics.count("psc_reloads_total", model=served.name, result="ok")
        logger.info("reloaded", extra={"versions": {name: now for name, _, now in changes}})
        return changes

    async def reload_when_free(self) -> None:
        """Reload every bundle, after a reload that is running: what that one reads may be out of date already.

        Raises:
            PSCError: As :meth:`reload`.
        """
        if self._awaited:  # What waits already will read what is there then.
            return
        self._awaited = True
        try:
            async with self._reloading:
                pass
        finally:
            self._awaited = False
        await self.reload()

    def sweep(self) -> None:
        """Deadlines, departed clients, bookkeeping; call a few times a second."""
        for served in self._served.values():
            served.engine.sweep()

    def begin_drain(self) -> None:
        """Report not ready; requests that still arrive are answered."""
        self._draining = True

    async def close(self, *, within_s: float) -> None:
        """Finish what was admitted, within a time, and end all threads."""
        engines = [served.engine.close(within_s=within_s) for served in self._served.values()]
        await asyncio.gather(*engines, *self._retiring)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _load(self, name: str) -> Model:
        if self._given is not None:
            return self._given[name]
        return await asyncio.to_thread(self._loader, self._paths[name])

    async def _prepare(self, name: str, model: Model) -> Served:
        settings = self._settings
        policy = Policy(
            alpha=settings.alpha or model.policy.alpha,
            ambiguity_threshold=(
                model.policy.ambiguity_threshold
                if settings.ambiguity_threshold is None
                else settings.ambiguity_threshold
            ),
            coverage=settings.coverage or model.policy.coverage,
        )
        try:
            model.calibration.ood_score_threshold(policy.alpha)
            set_thresholds = model.calibration.set_thresholds(policy.coverage).cpu().numpy()
        except UsageError as error:
            raise BundleError(f"model {name!r}: {error}") from error
        decoder = Decoder(
            self._pool,
            threads=self._decode_threads,
            preprocess=model.preprocess,
            max_pixels=settings.max_pixels,
            inline_bytes=settings.inline_decode_bytes,
        )
        step = make_step(
            model.pipeline,
            decoder.shape,
            max_batch=settings.max_batch_size,
            device=model.device,
            compiled=settings.compile,
            threads=settings.threads,
            usual_threads=self._usual_threads,
        )
        engine = Engine(
            name,
            step,
            decoder,
            limits=Limits(settings.max_batch_size, settings.max_queue_images, settings.max_delay_ms),
            metrics=self._metrics,
            on_failure=self._on_failure,
        )
        drift = DriftMonitor(
            len(model.calibration.scores),
            policy.alpha,
            false_alarm_probability=settings.drift_false_alarm,
            window=settings.drift_window,
        )
        await engine.start()
        labels = tuple(map(dump, model.classes))
        return Served(name, model, engine, policy, set_thresholds, drift, self._metrics, labels)

    def _swap(self, served: Served) -> None:
        old = self._served.get(served.name)
        self._served[served.name] = served
        if old is not None:
            old.hide()
            task = asyncio.get_running_loop().create_task(old.engine.close(within_s=self._settings.deadline_seconds))
            self._retiring.add(task)
            task.add_done_callback(self._retired)
        served.show()

    def _retired(self, task: asyncio.Task[None]) -> None:
        self._retiring.discard(task)
        if not self._retiring:
            self.on_retired()


def _default_threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))
