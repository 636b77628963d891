"""What the routes share, at ``app.state.service``: settings, models, metrics, keys, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import Request

from app.auth import ApiKeys, require
from app.errors import Forbidden
from app.metrics import Metrics
from app.model import Model
from app.registry import Loader, Registry
from app.settings import Settings
from app.step import gpu_usage
from psc_core.errors import DeviceError, PSCError

logger = logging.getLogger("psc.service")

SWEEP_SECONDS: Final = 0.05
"""How often deadlines, departed clients and bookkeeping are looked after."""

EXIT_BAD_INPUT, EXIT_FAILURE = 2, 1


class Service:
    """The parts of one service process.

    Args:
        settings: All settings.
        loader: Reads a bundle directory.
        models: Served by name instead of the bundles.

    Attributes:
        settings: As given.
        metrics: Of this application.
        keys: Who may do what.
        guard: Lets a request pass or raises 401; await it before anything else in a prediction route.
        registry: The models.
        exit_code: What the process should end with; set by :meth:`fatal`.
        exit_message: Why, one line.
        on_fatal: Called when the process should end; the server sets it.
        load_before_accepting: Whether the server should accept requests only once every model is ready,
            because other processes answer meanwhile.
        on_ready: Called when every model is ready; the server sets it.
        on_reloaded: Called when a client has had models reloaded; the server sets it.
        inflight: Requests being answered.
        draining: Whether the service is about to end.
    """

    def __init__(self, settings: Settings, loader: Loader, models: Mapping[str, Model] | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.keys = ApiKeys.from_settings(settings)
        self.guard: Callable[[Request], Awaitable[None]] = require(self.keys.predict)
        self._admin_guard = require(self.keys.admin)
        self.registry = Registry(settings, self.metrics, loader=loader, models=models, on_failure=self._device_failed)
        self.exit_code = 0
        self.exit_message = ""
        self.on_fatal: Callable[[], None] = lambda: None
        self.load_before_accepting = False
        self.on_ready: Callable[[], None] = lambda: None
        self.on_reloaded: Callable[[], None] = lambda: None
        self.inflight = 0
        self.draining = False
        self._tasks: list[asyncio.Task[None]] = []

    async def admin_guard(self, request: Request) -> None:
        """Let holders of an admin key pass.

        Raises:
            Forbidden: No admin key is configured, so nobody may.
            Unauthorized: No key, or not an admin key.
        """
        if not self.keys.admin:
            raise Forbidden("expected admin keys to be configured, there are none; set PSC_ADMIN_KEYS")
        await self._admin_guard(request)

    async def start(self) -> None:
        """Begin to load; readiness tells when it is done."""
        if not self.keys.predict:
            logger.warning("API keys are off: anyone who reaches this port may predict (PSC_API_KEYS)")
        if not self.keys.admin:
            logger.warning("admin keys are off: /admin answers 403 (PSC_ADMIN_KEYS)")
        loop = asyncio.get_running_loop()
        loading = loop.create_task(self._load())
        self._tasks = [loading, loop.create_task(self._sweep())]
        if self.load_before_accepting:
            await loading

    async def close(self) -> None:
        """Finish what was admitted and end all threads."""
        self.begin_drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.registry.close(within_s=self.settings.drain_seconds)
        self.metrics.book()

    def begin_drain(self) -> None:
        """Report not ready from now on."""
        self.draining = True
        self.registry.begin_drain()

    def fatal(self, message: str, exit_code: int) -> None:
        """Have the process end with ``exit_code`` once what was accepted is answered."""
        if self.exit_code == 0:
            self.exit_code, self.exit_message = exit_code, message
        self.on_fatal()

    def refresh(self) -> None:
        """Bring gauges and booked metrics up to date; before a scrape and with each sweep."""
        metrics = self.metrics
        metrics.gauge("psc_queue_depth", self.registry.pending)
        metrics.gauge("psc_inflight_requests", self.inflight)
        metrics.gauge("psc_ready", 0.0 if self.registry.reasons() else 1.0)
        metrics.book()

    def refresh_gpu(self) -> None:
        """Read GPU memory and utilisation, where there is a GPU."""
        for device in {served.model.device for served in self.registry.served}:
            usage = gpu_usage(device)
            for kind, size in usage.memory_bytes.items():
                self.metrics.gauge("psc_gpu_memory_bytes", size, device=str(device), kind=kind)
            if usage.utilisation is not None:
                self.metrics.gauge("psc_gpu_utilisation_ratio", usage.utilisation, device=str(device))

    async def reload_quietly(self) -> None:
        """Reload every bundle, when no other reload runs; a failure is logged and changes nothing (SIGHUP)."""
        try:
            await self.registry.reload_when_free()
        except PSCError as error:
            logger.error("reload failed, the old models stay: %s", error)

    async def _load(self) -> None:
        try:
            await self.registry.start()
            self.on_ready()
        except DeviceError as error:
            self.fatal(str(error), EXIT_FAILURE)
        except PSCError as error:
            self.fatal(str(error), EXIT_BAD_INPUT)
        except Exception as error:
            logger.critical("loading failed", exc_info=error)
            self.fatal(f"loading failed: {type(error).__name__}; see the log", EXIT_FAILURE)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self.registry.sweep()
                self.refresh()
            except Exception as error:
                logger.error("sweep failed", exc_info=error)

    def _device_failed(self, error: Exception) -> None:
        self.fatal(f"the compute device failed: {error}", EXIT_FAILURE)
