"""A model in service: the fitted model, its engine and its policy."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy.typing as npt
import torch

from app.errors import UnattainableAlpha, UnavailableMap
from app.inference.backend import choose_backend
from app.inference.batcher import Batcher
from app.inference.decoder import Decoder, EncodedImage
from app.inference.engine import Engine
from app.inference.fingerprints import fingerprints
from app.inference.request import Images, RequestMode
from app.inference.steps import Step, TorchThreads, make_step
from app.log.writer import LogWriter, ModelLog
from app.memory import MemoryBudget
from app.observability.drift import DriftMonitor
from app.observability.metrics import Metrics
from app.observability.recorder import ModelRecorder
from app.settings import MAX_DECODE_THREADS, Settings
from app.tasks.base import ServedTask, served_task
from psc_core.errors import BundleError, NetworkError, UsageError
from psc_core.images.preprocess import Preprocess
from psc_core.model import Backend
from psc_core.model.base import FittedModel
from psc_core.tasks.decide import BaseDecisions, BaseThresholds
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy

logger = logging.getLogger("psc.model")


class Predicted(NamedTuple):
    """The outputs and decisions for the images of one request."""

    outputs: Outputs[FloatArray]
    decisions: BaseDecisions
    explanation: dict[str, npt.NDArray[Any]]  # by name, the first axis is the images; empty unless asked for


@dataclass(frozen=True)
class ServedModel:
    """One model in service."""

    name: str  # the name of the served model
    model: FittedModel  # the fitted model
    backend: str  # the backend that runs the network, see :mod:`psc_core.model.backends`
    engine: Engine  # the model's queue and device worker
    thresholds: BaseThresholds  # the thresholds of a request that sets none
    recorder: ModelRecorder  # records the predictions in metrics and drift
    log: ModelLog | None  # logs the predictions with their images; None if predictions are not logged

    @cached_property
    def task(self) -> ServedTask[Any]:
        """The model's task in service."""
        return served_task(self.model.task)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The members of every answer that identify the model and its task."""
        reference = {"name": self.name, "version": self.model.version, "layer": self.model.layer}
        return {"model": reference, **self.model.task.model_dump()}

    @property
    def headline(self) -> str:
        """The sentence on what is promised of accepted images."""
        return self.thresholds.policy.headline(self.model.report.get("metrics", {}))

    def thresholds_with(self, **changes: float) -> BaseThresholds:
        """Return the thresholds of a request that changes some of the policy's values.

        Raises:
            UnattainableAlpha: If there are too few calibration images for this alpha.
        """
        if not changes:
            return self.thresholds
        try:
            calibration = self.model.calibration
            return calibration.thresholds(calibration.changed(self.thresholds.policy, changes))
        except UsageError as error:
            raise UnattainableAlpha(str(error)) from error

    def check_map(self, mode: RequestMode) -> None:
        """Raise :class:`UnavailableMap` if the request asks for a map, and the model has none."""
        if mode.has_map and self.model.pipeline.map is None:
            raise UnavailableMap(f"model {self.name!r} was fitted without a map; leave out map")

    async def predict(
        self,
        images: Sequence[EncodedImage] | Images,
        thresholds: BaseThresholds,
        *,
        disconnected: Callable[[], bool],
        mode: RequestMode = RequestMode.PREDICT,
        monitor: bool = True,
    ) -> Predicted:
        """Predict the images of one request, decide, and record the predictions.

        Args:
            images: The images, see :meth:`app.inference.engine.Engine.predict`.
            thresholds: The thresholds of the decisions.
            disconnected: Returns whether the client has left.
            mode: Which outputs to compute.
            monitor: Whether the images count in drift and in the metrics of scores.

        Raises:
            UnavailableMap: If the request asks for a map, and the model has none.
            ServiceError: See :meth:`app.inference.engine.Engine.predict`.
        """
        self.check_map(mode)
        result = await self.engine.predict(images, disconnected=disconnected, mode=mode)
        outputs = self.model.outputs(result.packed)
        decisions = thresholds.decide(outputs)
        self.recorder.predicted(outputs, decisions, await fingerprints(images) if monitor else None)
        if self.log is not None:
            self.log.predicted(images, outputs, decisions, thresholds.policy, is_monitored=monitor)
        return Predicted(outputs, decisions, result.explanation)


class ModelStarter:
    """Turns fitted models into served ones.

    Args:
        settings: The service's settings.
        metrics: The application's metrics.
        memory: The bytes that requests may hold.
        log: The writer of the prediction log; None if predictions are not logged.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        memory: MemoryBudget,
        log: LogWriter | None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._memory = memory
        self._log = log
        self._threads = TorchThreads(settings.threads or torch.get_num_threads(), settings.threads or 1)
        self._decode_threads = settings.decode_threads or min(MAX_DECODE_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._decode_threads, thread_name_prefix="psc-decode")

    async def start(self, name: str, model: FittedModel) -> ServedModel:
        """Build the engine of a model and warm it up.

        Raises:
            BundleError: If there are too few calibration images for the policy, or the network does not run on the
                wanted backend.
            DeviceError: If the network failed while it was warmed up.
        """
        try:
            changes = self._settings.thresholds(type(model.policy))
            thresholds = model.calibration.thresholds(model.calibration.changed(model.policy, changes))
            backend, step = await asyncio.to_thread(self._step, model)
        except (UsageError, NetworkError) as error:
            raise BundleError(f"model {name!r}: {error}") from error
        recorder = self._recorder(name, model, thresholds.policy)
        log = None if self._log is None else self._log.log_of(name, model)
        engine = Engine(
            name,
            step,
            self._decoder(model.preprocess),
            batcher=self._batcher(model.device),
            observer=recorder,
            deadline_s=self._settings.deadline_seconds,
        )
        try:
            await engine.start()
        except BaseException:  # Also if cancelled: the thread that warms up would keep the model in memory.
            await engine.close(within_s=0)
            raise
        served = ServedModel(name, model, backend, engine, thresholds, recorder, log)
        logger.info("%s: %s", name, served.headline)
        return served

    def close(self) -> None:
        """End the decode threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _step(self, model: FittedModel) -> tuple[Backend, Step]:
        """Return the step of the wanted or of the fastest backend; measuring takes seconds."""
        settings, threads = self._settings, self._threads
        wanted: Backend | Literal["auto"] = "folded" if settings.compile else settings.backend
        backend, pipeline = choose_backend(model, wanted, max_batch=settings.max_batch_size, threads=threads.full)
        return backend, make_step(
            pipeline,
            model.preprocess.shape,
            max_batch=settings.max_batch_size,
            device=model.device,
            threads=threads,
            compiled=settings.compile,
        )

    def _decoder(self, preprocess: Preprocess) -> Decoder:
        return Decoder(
            self._pool,
            self._memory,
            threads=self._decode_threads,
            preprocess=preprocess,
            max_pixels=self._settings.max_pixels,
            max_request_pixels=self._settings.max_pixels_per_request,
            inline_bytes=self._settings.inline_decode_bytes,
        )

    def _batcher(self, device: torch.device) -> Batcher:
        return Batcher(
            max_batch=self._settings.max_batch_size,
            max_queue_images=self._settings.max_queue_images,
            max_delay_s=self._settings.max_delay_ms / 1000.0,
            shares_cores=device.type == "cpu",
        )

    def _recorder(self, name: str, model: FittedModel, policy: BasePolicy) -> ModelRecorder:
        drift = DriftMonitor(
            len(model.calibration.ood_scores),
            policy.alpha,
            false_alarm_probability=self._settings.drift_false_alarm / self._settings.drift_monitors,
            window=self._settings.drift_window,
        )
        limit = self._settings.max_queue_images
        return ModelRecorder(name, model, policy=policy, queue_limit=limit, metrics=self._metrics, drift=drift)
