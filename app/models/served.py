"""A model in service: the fitted model, its engine and its policy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from app.errors import UnattainableAlpha
from app.inference.backend import choose_backend
from app.inference.batcher import Batcher
from app.inference.decoder import Decoder
from app.inference.engine import Engine
from app.inference.steps import make_step
from app.observability.drift import DriftMonitor
from app.observability.metrics import Metrics
from app.observability.recorder import ModelRecorder
from app.settings import Settings
from psc_core.errors import BundleError, UsageError
from psc_core.model.decision import Decisions, decide
from psc_core.model.outputs import FloatArray, Outputs
from psc_core.model.predictor import PSC
from psc_core.policy import Policy


@dataclass(frozen=True)
class ServedModel:
    """One model in service.

    Attributes:
        name: Under which it is served.
        model: The fitted model.
        backend: What its network runs on, see :mod:`psc_core.model.backends`.
        engine: Its queue and device worker.
        policy: Thresholds when the request sets none.
        set_thresholds: (K,) of the prediction sets.
        recorder: Told of its predictions.
    """

    name: str
    model: PSC
    backend: str
    engine: Engine
    policy: Policy
    set_thresholds: FloatArray
    recorder: ModelRecorder

    def policy_with(self, *, alpha: float | None = None, ambiguity_threshold: float | None = None) -> Policy:
        """The policy with a request's own thresholds.

        Raises:
            UnattainableAlpha: The calibration images are too few for this alpha.
        """
        own = {"alpha": alpha, "ambiguity_threshold": ambiguity_threshold}
        changes = {name: value for name, value in own.items() if value is not None}
        if not changes:
            return self.policy
        if alpha is not None:
            try:
                self.model.calibration.ood_score_threshold(alpha)
            except UsageError as error:
                raise UnattainableAlpha(str(error)) from error
        return self.policy.model_copy(update=changes)

    def decide(self, outputs: Outputs[FloatArray], policy: Policy) -> Decisions:
        """Outputs to decisions."""
        return decide(outputs, self.set_thresholds, policy)


class ModelStarter:
    """Turns fitted models into served ones.

    Args:
        settings: Of the service.
        metrics: Where they are recorded.
        on_failure: Called on the event loop when a model's device is dead.
    """

    def __init__(self, settings: Settings, metrics: Metrics, *, on_failure: Callable[[Exception], None]) -> None:
        self._settings = settings
        self._metrics = metrics
        self._on_failure = on_failure
        self._default_threads = torch.get_num_threads()
        self._decode_threads = settings.decode_threads or min(16, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._decode_threads, thread_name_prefix="psc-decode")

    async def start(self, name: str, model: PSC) -> ServedModel:
        """Build the engine of a model and warm it up.

        Raises:
            BundleError: The calibration images are too few for the policy.
            NetworkError: The network does not run on the backend that was asked for.
            DeviceError: The network failed while it was warmed up.
        """
        settings = self._settings
        policy = settings.policy(model.policy)
        try:
            model.calibration.ood_score_threshold(policy.alpha)
            set_thresholds: FloatArray = model.calibration.set_thresholds(policy.coverage).cpu().numpy()
        except UsageError as error:
            raise BundleError(f"model {name!r}: {error}") from error
        drift = DriftMonitor(
            len(model.calibration.scores),
            policy.alpha,
            false_alarm_probability=settings.drift_false_alarm / settings.drift_monitors,
            window=settings.drift_window,
        )
        limit = settings.max_queue_images
        recorder = ModelRecorder(name, model, alpha=policy.alpha, queue_limit=limit, metrics=self._metrics, drift=drift)
        decoder = Decoder(
            self._pool,
            threads=self._decode_threads,
            preprocess=model.preprocess,
            max_pixels=settings.max_pixels,
            inline_bytes=settings.inline_decode_bytes,
        )
        wanted = "folded" if settings.compile else settings.backend
        threads = settings.threads or self._default_threads
        choose = partial(choose_backend, model, wanted, max_batch=settings.max_batch_size, threads=threads)
        backend, pipeline = await asyncio.to_thread(choose)
        step = make_step(
            pipeline,
            decoder.shape,
            max_batch=settings.max_batch_size,
            device=model.device,
            compiled=settings.compile,
            threads=settings.threads,
            default_threads=self._default_threads,
        )
        batcher = Batcher(
            max_batch_size=settings.max_batch_size,
            max_queue_images=settings.max_queue_images,
            max_delay_s=settings.max_delay_ms / 1000.0,
        )
        engine = Engine(
            name,
            step,
            decoder,
            batcher=batcher,
            observer=recorder,
            on_failure=self._on_failure,
        )
        await engine.start()
        return ServedModel(name, model, backend, engine, policy, set_thresholds, recorder)

    def close(self) -> None:
        """End the decode threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
