"""The served models: check that one can be warmed up here, load it, warm it up, and swap it for another.

A reload reads, verifies, builds and warms up the new model beside the old one, swaps one reference, and then lets the
old engine finish the requests that it has admitted.  A bundle that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from app.drift import DriftMonitor
from app.errors import NotReady, ReloadRunning, UnattainableAlpha, UnavailableMap, UnknownModel
from app.inference.batcher import Batcher, Images, RequestMode
from app.inference.decoder import DecodedImages, Decoder, EncodedImage, fingerprints
from app.inference.engine import Engine, Phase
from app.inference.steps import Chosen, TorchThreads, choose_backend, make_step
from app.log import LogWriter, ModelLog
from app.memory import MemoryBudget, limits
from app.metrics import Metrics, ModelRecorder
from app.settings import Settings
from psc_core.answers import BasePolicy
from psc_core.checks import REVIEWED
from psc_core.errors import BundleError, NetworkError, PSCError, UsageError
from psc_core.maps import map_document
from psc_core.model import FittedModel, build_model
from psc_core.network.onnx import OnnxBody
from psc_core.pipeline import MAP, REVIEWED_DISTANCE, Pipeline
from psc_core.settings import Backend
from psc_core.stored_images import STORED_DISTANCE
from psc_core.tasks.base import BaseDecisions, FloatArray, Outputs

logger = logging.getLogger("psc.models")

# The number of a batch's feature maps in memory at once: an operation's input and output, and a shortcut past it.
ALIVE: Final = 3
EFFICIENCY: Final = 0.3  # the speed of a network as a fraction of the speed of a matrix product
_SIDE: Final = 1024


def check_affordable(model: FittedModel, *, max_batch: int, seconds: float) -> None:
    """Refuse a model whose full batch does not fit in memory, or that takes longer than ``seconds`` to warm up.

    One image on PyTorch's meta device, which computes nothing, gives the number of operations and the size of the
    largest feature map; a matrix product gives the speed of the device.  Warm-up runs at most batches of 1, 2, 4, …
    images, which have twice the images of a full batch.
    """
    try:
        alive, operations = cost_of_an_image(model)
    except (RuntimeError, NotImplementedError):  # The meta device lacks an operation of a user's own network.
        logger.warning("the cost of the network is not known", extra={"model": model.name})
        return
    at_once = 2 if model.device.type == "cpu" and torch.get_num_threads() > 1 else 1  # see EagerStep.beside
    needed, free = at_once * (alive * max_batch + scratch_bytes(model)), free_bytes(model.device)
    size = " × ".join(map(str, model.preprocess.shape[1:]))
    if needed > free:
        raise BundleError(
            f"model {model.name!r}: a batch of {max_batch} images of {size} pixels needs about {needed / 2**30:.1f} "
            f"GiB, and {free / 2**30:.1f} GiB are free; lower --max-batch-size, or fit the network for smaller images"
        )
    expected = 2 * max_batch * operations / operations_per_second(model.device)
    if expected > seconds:
        raise BundleError(
            f"model {model.name!r}: warming up batches of {max_batch} images of {size} pixels would take about "
            f"{expected:.0f} s, longer than {seconds:g} s; lower --max-batch-size or raise --warmup-seconds"
        )


class _NoTracker(ModuleTracker):
    """Tracks no modules, because torch's tracker hooks all modules of the process, even those in service."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@torch.inference_mode()
def cost_of_an_image(model: FittedModel) -> tuple[int, int]:
    """Return the bytes in memory at once and the number of operations for one image.

    The bytes are :data:`ALIVE` times the largest output of a module.
    """
    if isinstance(model.backbone.body, OnnxBody) and model.backbone.body.cost is not None:
        return model.backbone.body.cost[:2]
    largest = 0

    def measure(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    network = deepcopy(model.backbone).to("meta")
    image = torch.empty(1, *model.preprocess.shape, device="meta")
    for module in network.modules():  # Of this copy alone: other models serve on other threads meanwhile.
        module.register_forward_hook(measure)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoTracker()
    with counter:
        network(image)
    return ALIVE * largest, counter.get_total_flops()


def scratch_bytes(model: FittedModel) -> int:
    """Return the bytes that a batch takes beside those of its images, as far as a graph tells."""
    body = model.backbone.body
    return body.cost.scratch if isinstance(body, OnnxBody) and body.cost is not None else 0


def operations_per_second(device: torch.device) -> float:
    """Return the float32 operations per second, at :data:`EFFICIENCY`, of the faster of two matrix products."""
    factor = torch.ones(_SIDE, _SIDE, device=device)
    fastest = math.inf
    for _ in range(2):
        began = time.perf_counter()
        float((factor @ factor)[0, 0])
        fastest = min(fastest, time.perf_counter() - began)
    return EFFICIENCY * 2 * _SIDE**3 / fastest


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the GPU, or on this machine and in its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(limit - used for limit, used in limits())


def load_bundle(settings: Settings, name: str) -> FittedModel:
    """Read, verify, build and probe the bundle that the settings give this name."""
    path = dict(settings.named_bundles)[name]
    model = build_model(path, device=settings.device, allow_factories=settings.allow_factories)
    # Before its first image, for which an oversized network would take minutes, or all memory.
    check_affordable(model, max_batch=settings.max_batch_size, seconds=settings.warmup_seconds)
    return model.probed()


class Predicted(NamedTuple):
    """The outputs and decisions for the images of one request."""

    outputs: Outputs[FloatArray]
    decisions: BaseDecisions
    explanation: dict[str, npt.NDArray[Any]]  # by name, the first axis is the images; empty unless asked for


@dataclass(frozen=True)
class ServedModel:
    """One model in service."""

    name: str
    model: FittedModel  # the fitted model
    backend: str  # what runs the network, see :func:`psc_core.pipeline.pipeline_on`
    is_final: bool  # whether the backend was wanted or measured; otherwise another one may be faster
    engine: Engine  # the model's queue and device worker
    policy: BasePolicy  # of a request that sets no threshold
    recorder: ModelRecorder  # records the predictions in metrics and drift
    log: ModelLog | None  # logs the predictions with their images; None if predictions are not logged

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The members of every answer that identify the model and its task."""
        reference = {"name": self.name, "version": self.model.version, "layer": self.model.layer}
        return {"model": reference, **self.model.task.model_dump()}

    def policy_with(self, **changes: float) -> BasePolicy:
        """Return the policy of a request that changes some of its values."""
        if not changes:
            return self.policy
        policy = self.model.calibration.changed(self.policy, changes)
        try:
            self.model.calibration.check(policy)
        except UsageError as error:
            raise UnattainableAlpha(str(error)) from error
        return policy

    def check_map(self, mode: RequestMode) -> None:
        """Raise :class:`UnavailableMap` if the request asks for a map, and the model has none."""
        if mode.has_map and self.model.pipeline.map is None:
            raise UnavailableMap(f"model {self.name!r} was fitted without a map; leave out map")

    async def predict(
        self,
        images: Sequence[EncodedImage] | Images,
        policy: BasePolicy,
        *,
        disconnected: Callable[[], bool],
        mode: RequestMode = RequestMode.PREDICT,
        monitor: bool = True,
    ) -> Predicted:
        """Predict the images of one request, decide, and record the predictions."""
        self.check_map(mode)
        if isinstance(images, DecodedImages) and images.version != self.model.version:
            images = list(images)  # They were decoded for the model before a reload.
        result = await self.engine.predict(images, disconnected=disconnected, mode=mode)
        outputs = self.model.outputs(result.packed)
        decisions = self.model.calibration.decide(outputs, policy)
        self.recorder.predicted(outputs, decisions, await fingerprints(images) if monitor else None)
        if self.log is not None:
            self.log.predicted(images, outputs, decisions, policy, is_monitored=monitor)
        return Predicted(outputs, decisions, result.explanation)


def explain(model: FittedModel, predicted: Predicted, alpha: float) -> list[dict[str, Any]]:
    """Return each image's explanation, with the nearest training images and the map where the model has them.

    It names the reviewed images that an unusual one is like, where the check's p-value is at most ``alpha``.
    """
    outputs, decisions, explanation = predicted
    documents = model.task.explanations(explanation, model.classes, model.head_layers)
    stored_images, layer_map = model.pipeline.stored_images, model.pipeline.map
    if stored_images is not None:
        distances, likely = explanation[STORED_DISTANCE], decisions.likely_classes(outputs)
        for document, of_image, first in zip(documents, distances, likely, strict=True):
            document["nearest"] = stored_images.documents(of_image, model.classes, first)
    reviewed = model.pipeline.scorer.reviewed if REVIEWED in explanation else None
    if reviewed is not None:
        values, p_values = explanation[REVIEWED], outputs.check_p_values[:, outputs.checks.index(REVIEWED)]
        for at in (decisions.is_ood & (p_values <= alpha)).nonzero()[0].tolist():
            kind = int(values[at].argmax())
            documents[at][REVIEWED] = found = reviewed.kinds[kind]._asdict()
            if reviewed.stored_images is not None:
                names, distances = [each.name for each in reviewed.kinds], explanation[REVIEWED_DISTANCE][at]
                found["nearest"] = reviewed.stored_images.documents(distances, names, [kind])
    if layer_map is not None and MAP in explanation:
        for document, grey in zip(documents, explanation[MAP], strict=True):
            document["map"] = map_document(layer_map.layer, grey)
    return documents


class ModelStarter:
    """Turns fitted models into served ones."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        memory: MemoryBudget,
        log: LogWriter | None,
        decoding: Collection[int],
    ) -> None:
        self._settings = settings
        self._decoding = decoding  # the numbers of requests whose images other processes decode now
        self._metrics = metrics
        self._memory = memory
        self._log = log  # the writer of the prediction log; None if predictions are not logged
        self._threads = TorchThreads(settings.threads or torch.get_num_threads(), settings.threads or 1)
        self._pool = ThreadPoolExecutor(settings.decoders, thread_name_prefix="psc-decode")

    async def start(self, name: str, model: FittedModel, *, may_measure: bool) -> ServedModel:
        """Build the engine of a model and warm it up; it may have to answer before its backends are measured."""
        settings = self._settings
        try:
            changes = settings.thresholds(type(model.policy))
            policy = model.calibration.changed(model.policy, changes)
            model.calibration.check(policy)
            chosen = await _aside(lambda: self._choose(model, may_measure))
        except (UsageError, NetworkError) as error:
            raise BundleError(f"model {name!r}: {error}") from error
        drift = DriftMonitor(
            len(model.calibration.ood_scores),
            policy.alpha,
            false_alarm_probability=settings.drift_false_alarm / settings.drift_monitors,
            window=settings.drift_window,
        )
        limit = settings.max_queue_images
        recorder = ModelRecorder(name, model, policy=policy, queue_limit=limit, metrics=self._metrics, drift=drift)
        engine = await self._warm_engine(name, model, chosen.pipeline, recorder)
        log = None if self._log is None else self._log.log_of(name, model)
        served = ServedModel(name, model, chosen.backend, chosen.is_final, engine, policy, recorder, log)
        logger.info("%s: %s", name, model.headline(policy))
        return served

    def warn_of_unread(self, served: Iterable[ServedModel]) -> None:
        """Warn of thresholds that no model reads."""
        if unread := self._settings.unread_thresholds(type(each.policy) for each in served):
            logger.warning("no served model has %s, so that it changes nothing", " or ".join(unread))

    async def faster(self, served: ServedModel) -> ServedModel | None:
        """Measure the backends of a model that serves on the first one; return it on a faster one, if there is one."""
        chosen = await _aside(lambda: self._choose(served.model, may_measure=True))
        if chosen.backend == served.backend:
            return None
        engine = await self._warm_engine(served.name, served.model, chosen.pipeline, served.recorder)
        return replace(served, backend=chosen.backend, is_final=True, engine=engine)

    def close(self) -> None:
        """End the decode threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _choose(self, model: FittedModel, may_measure: bool) -> Chosen:
        settings = self._settings
        wanted: Backend | Literal["auto"] = "folded" if settings.compile else settings.backend
        size, threads = settings.max_batch_size, self._threads.full
        return choose_backend(model, wanted, max_batch=size, threads=threads, may_measure=may_measure)

    async def _warm_engine(self, name: str, model: FittedModel, pipeline: Pipeline, recorder: ModelRecorder) -> Engine:
        settings = self._settings
        size, device = settings.max_batch_size, model.device
        step = make_step(
            pipeline,
            model.preprocess.shape,
            max_batch=size,
            device=device,
            threads=self._threads,
            compiled=settings.compile,
        )
        batcher = Batcher(
            max_batch=size,
            max_queue_images=settings.max_queue_images,
            max_delay_s=settings.max_delay_ms / 1000.0,
            shares_cores=device.type == "cpu",
            elsewhere=lambda: int(sum(self._decoding)),
        )
        decoder = Decoder(self._pool, self._memory, model.preprocess, settings)
        seconds = settings.deadline_seconds
        engine = Engine(name, step, decoder, batcher=batcher, recorder=recorder, deadline_s=seconds)
        try:
            await engine.start()
        except BaseException:  # Also if cancelled: the thread that warms up would keep the model in memory.
            await engine.close(within_s=0)
            raise
        return engine


Made = TypeVar("Made")


async def _aside(work: Callable[[], Made]) -> Made:
    """Run ``work`` on a daemon thread: the end of the process does not wait for it, as it does for the loop's own."""
    done: Future[Made] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="psc-prepare", daemon=True).start()
    return await asyncio.wrap_future(done)


class Registry:
    """The models by name; to be used on the event loop only."""

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[str], FittedModel],
        starter: ModelStarter,
        metrics: Metrics,
        *,
        retire_within_s: float,
        unloaded: npt.NDArray[np.int8],
    ) -> None:
        # Set when every model is ready, and when all replaced models have ended; who reacts to it clears it.
        self.changed = asyncio.Event()
        self.names = tuple(names)  # the default first
        self._load = load  # reads a model again, on a thread
        self._starter = starter
        self._metrics = metrics
        self._retire_within_s = retire_within_s
        self._served: dict[str, ServedModel] = {}
        self._reloading = asyncio.Lock()
        self._reload_waits = False
        self._unloaded = unloaded  # which of the names were taken out of service; the flags may outlive this process
        self._retiring: dict[asyncio.Task[None], ServedModel] = {}

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """The models in service."""
        return tuple(self._served.values())

    @property
    def unloaded(self) -> set[str]:
        """The names of the models that were taken out of service."""
        return {name for name, is_unloaded in zip(self.names, self._unloaded, strict=True) if is_unloaded}

    def get(self, name: str | None = None) -> ServedModel:
        """Return the model of this name, or the default model."""
        if name is None and self.names:
            name = self.names[0]
        served = self._served.get(name or "")
        if served is not None:
            return served
        if name not in self.names:
            raise UnknownModel(f"no model {name!r}; the models are {', '.join(self.names)}")
        if name in self.unloaded:
            raise NotReady(f"model {name!r} was unloaded; load it")
        raise NotReady(f"model {name!r} is loading; try again in 5 s", retry_after=5)

    def reasons(self) -> dict[str, str]:
        """Return why a model that should be ready is not, by model name; empty if all are ready.

        An unloaded model should not be, unless all are.
        """
        reasons = dict.fromkeys(self.names, "unloaded") if self.unloaded == {*self.names} else {}
        reasons |= {name: "loading" for name in self.names if name not in {*self._served, *self.unloaded}}
        for name, served in self._served.items():
            if served.engine.phase is not Phase.READY:
                reasons[name] = served.engine.phase.value
        return reasons

    async def start(self) -> None:
        """Load and warm up every model, each on a backend that is ready at once."""
        async with self._reloading:  # So that a reload on SIGHUP comes afterwards, for what was read before it.
            for name in [each for each in self.names if each not in self.unloaded]:
                began = time.perf_counter()
                served = await self._start(name, may_measure=False)
                self._swap(served)
                model, seconds = served.model, round(time.perf_counter() - began, 3)
                extra = {"model": name, "version": model.version, "device": str(model.device), "seconds": seconds}
                logger.info("model ready", extra=extra)
        if not self.unloaded:
            self._starter.warn_of_unread(self.served)
        self.changed.set()

    async def settle(self) -> None:
        """Measure the backends of the models that began on the first one, and let them go on with the fastest."""
        for served in [served for served in self.served if not served.is_final]:
            try:
                faster = await self._starter.faster(served)
            except Exception as error:  # Such as too little memory for both.
                is_ours = isinstance(error, PSCError)
                logger.warning("%s goes on on its first backend: %s", served.name, error, exc_info=not is_ours)
                continue
            if faster is None:
                continue
            if self._served.get(served.name) is served:
                self._served[served.name] = faster
                self._begin_to_retire(served)
            else:  # A reload has replaced it meanwhile.
                await faster.engine.close(within_s=0)

    async def reload(self, name: str | None = None) -> list[tuple[str, str, str]]:
        """Reload one bundle, or all, and swap the models; an unloaded model is loaded only by its name.

        Return the name, previous version ("" if it was unloaded) and new version of each.
        """
        names = [each for each in self.names if each not in self.unloaded] if name is None else [name]
        for each in names:
            if each not in self.unloaded:
                self.get(each)
        if self._reloading.locked():
            raise ReloadRunning("another reload is running; try again when it is done")
        fresh: list[ServedModel] = []
        async with self._reloading:
            for each in names:
                try:
                    fresh.append(await self._start(each, may_measure=True))
                except BaseException:
                    self._metrics.psc_reloads_total.labels(model=each, result="failed").inc()
                    for served in fresh:
                        await served.engine.close(within_s=0)
                    raise
        changes = []
        for served in fresh:
            old = self._served.get(served.name)
            changes.append((served.name, "" if old is None else old.model.version, served.model.version))
            self._swap(served)
            self._metrics.psc_reloads_total.labels(model=served.name, result="ok").inc()
        logger.info("reloaded", extra={"versions": {name: now for name, _, now in changes}})
        return changes

    def unload(self, name: str) -> None:
        """Take a model out of service until it is loaded by its name; the requests it has admitted are finished."""
        old = None if name in self.unloaded else self.get(name)
        if self._reloading.locked():
            raise ReloadRunning("a reload is running; try again when it is done")
        if old is None:
            return
        del self._served[name]
        self._unloaded[self.names.index(name)] = 1
        self._metrics.psc_queue_depth.labels(model=name).set(0)
        old.recorder.hide()
        self._begin_to_retire(old)

    async def reload_when_free(self) -> None:
        """Reload every bundle once the running reload has ended, because that may have read older files."""
        if self._reload_waits:  # That reload has not read anything yet, and will see the same files.
            return
        self._reload_waits = True
        try:
            async with self._reloading:
                pass
        finally:
            self._reload_waits = False
        await self.reload()

    def sweep(self) -> None:
        """Fail requests past their deadline and drop those whose clients left; to be called a few times a second."""
        for served in self._served.values():
            served.engine.sweep()

    @property
    def device_error(self) -> Exception | None:
        """The error that killed the device of a model in service; None while all devices work."""
        return next((error for served in self.served if (error := served.engine.device_error)), None)

    def refresh_metrics(self) -> None:
        """Bring the metrics of the models up to date."""
        for name, served in self._served.items():
            served.recorder.flush()
            self._metrics.psc_queue_depth.labels(model=name).set(served.engine.pending)

    async def close(self, *, within_s: float) -> None:
        """Finish the admitted requests within ``within_s`` seconds, and end all threads."""
        retiring = dict(self._retiring)
        models = (*self._served.values(), *retiring.values())
        await asyncio.gather(*(served.engine.close(within_s=within_s) for served in models))
        for task in retiring:  # They may have been given more time than is left now.
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        self._starter.close()
        self.refresh_metrics()

    async def _start(self, name: str, *, may_measure: bool) -> ServedModel:
        model = await _aside(lambda: self._load(name))
        return await self._starter.start(name, model, may_measure=may_measure)

    def _swap(self, served: ServedModel) -> None:
        old = self._served.get(served.name)
        self._served[served.name] = served
        self._unloaded[self.names.index(served.name)] = 0
        if old is not None:
            old.recorder.hide()
            self._begin_to_retire(old)
        served.recorder.show()

    def _begin_to_retire(self, old: ServedModel) -> None:
        closing = old.engine.close(within_s=self._retire_within_s)
        task = asyncio.get_running_loop().create_task(closing)
        self._retiring[task] = old
        task.add_done_callback(self._retired)

    def _retired(self, task: asyncio.Task[None]) -> None:
        del self._retiring[task]
        if not self._retiring:  # Nothing holds a replaced model any more.
            self.changed.set()
