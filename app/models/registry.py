"""Keep the served models by name, and swap one for another without losing a request.

A reload reads, verifies, builds and warms up the new model beside the old one, swaps one reference, and then lets the
old engine finish the requests that it has admitted.  A bundle that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from app.errors import NotReady, ReloadRunning, UnknownModel
from app.inference.engine import Phase
from app.models.served import ModelStarter, ServedModel
from app.models.sources import ModelSource
from app.observability.metrics import Metrics

logger = logging.getLogger("psc.registry")


class Registry:
    """The models by name; to be used on the event loop only.

    Args:
        source: Where the fitted models come from.
        starter: Turns fitted models into served ones.
        metrics: The application's metrics.
        retire_within_s: The time in which a replaced model must finish the requests it has admitted, seconds.

    Attributes:
        changed: Set when every model is ready, and when all replaced models have ended; who reacts to it clears it.
    """

    def __init__(self, source: ModelSource, starter: ModelStarter, metrics: Metrics, *, retire_within_s: float) -> None:
        self.changed = asyncio.Event()
        self._source = source
        self._names = source.names
        self._starter = starter
        self._metrics = metrics
        self._retire_within_s = retire_within_s
        self._served: dict[str, ServedModel] = {}
        self._reloading = asyncio.Lock()
        self._reload_waits = False
        self._unloaded: set[str] = set()
        self._retiring: dict[asyncio.Task[None], ServedModel] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The model names, the default first."""
        return self._names

    @property
    def unloaded(self) -> frozenset[str]:
        """The names of the models that were taken out of service."""
        return frozenset(self._unloaded)

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """The models in service."""
        return tuple(self._served.values())

    def get(self, name: str | None = None) -> ServedModel:
        """Return the model of this name, or the default model.

        Raises:
            UnknownModel: If there is no model of this name.
            NotReady: If the model is still loading, or was unloaded.
        """
        if name is None and self._names:
            name = self._names[0]
        served = self._served.get(name or "")
        if served is not None:
            return served
        if name not in self._names:
            raise UnknownModel(f"no model {name!r}; the models are {', '.join(self._names)}")
        if name in self._unloaded:
            raise NotReady(f"model {name!r} was unloaded; load it")
        raise NotReady(f"model {name!r} is loading; try again in a few seconds")

    def reasons(self) -> dict[str, str]:
        """Return why a model that should be ready is not, by model name; empty if all are ready."""
        reasons = {name: "loading" for name in self._names if name not in {*self._served, *self._unloaded}}
        for name, served in self._served.items():
            if served.engine.phase is not Phase.READY:
                reasons[name] = served.engine.phase.value
        return reasons

    async def start(self) -> None:
        """Load and warm up every model.

        Raises:
            PSCError: If a bundle cannot be used, or its network failed at warm-up.
        """
        for name in self._names:
            began = time.perf_counter()
            served = await self._start(name)
            self._swap(served)
            model, seconds = served.model, round(time.perf_counter() - began, 3)
            extra = {"model": name, "version": model.version, "device": str(model.device), "seconds": seconds}
            logger.info("model ready", extra=extra)
        self.changed.set()

    async def reload(self, name: str | None = None) -> list[tuple[str, str, str]]:
        """Reload one bundle, or all, and swap the models; an unloaded model is loaded only by its name.

        Returns:
            (name, previous version, new version) of each model; the previous version of an unloaded model is empty.

        Raises:
            UnknownModel: If there is no model of this name.
            NotReady: If the model is still loading for the first time.
            ReloadRunning: If another reload is running.
            BundleError: If a bundle cannot be used; no model was changed.
            DeviceError: If the new network failed at warm-up; no model was changed.
        """
        names = [each for each in self._names if each not in self._unloaded] if name is None else [name]
        for each in names:
            if each not in self._unloaded:
                self.get(each)
        if self._reloading.locked():
            raise ReloadRunning("another reload is running; try again when it is done")
        fresh: list[ServedModel] = []
        async with self._reloading:
            try:
                for each in names:
                    fresh.append(await self._start(each))
            except BaseException:
                for served in fresh:
                    await served.engine.close(within_s=0)
                for each in names:
                    self._metrics.psc_reloads_total.labels(model=each, result="failed").inc()
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
        """Take a model out of service until it is loaded by its name; the requests it has admitted are finished.

        Raises:
            UnknownModel: If there is no model of this name.
            NotReady: If the model is still loading for the first time, or was unloaded already.
            ReloadRunning: If a reload is running.
        """
        old = self.get(name)
        if self._reloading.locked():
            raise ReloadRunning("a reload is running; try again when it is done")
        del self._served[name]
        self._unloaded.add(name)
        self._metrics.psc_queue_depth.labels(model=name).set(0)
        self._begin_to_retire(old)

    async def reload_when_free(self) -> None:
        """Reload every bundle once the running reload has ended, because that may have read older files.

        Raises:
            PSCError: See :meth:`reload`.
        """
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

    async def _start(self, name: str) -> ServedModel:
        return await self._starter.start(name, await asyncio.to_thread(self._source.load, name))

    def _swap(self, served: ServedModel) -> None:
        old = self._served.get(served.name)
        self._served[served.name] = served
        self._unloaded.discard(served.name)
        if old is not None:
            self._begin_to_retire(old)
        served.recorder.show()

    def _begin_to_retire(self, old: ServedModel) -> None:
        closing = old.engine.close(within_s=self._retire_within_s)
        task = asyncio.get_running_loop().create_task(closing)
        self._retiring[task] = old
        task.add_done_callback(self._retired)
        old.recorder.hide()

    def _retired(self, task: asyncio.Task[None]) -> None:
        del self._retiring[task]
        if not self._retiring:  # Nothing holds a replaced model any more.
            self.changed.set()
