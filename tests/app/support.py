"""A running application with a client, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.main import create_app
from app.runtime import Runtime
from app.service import Service
from app.settings import load_settings
from psc_core.model.predictor import PSC
from tests.app.fakes import FakeModel

PNG = {"content-type": "image/png"}


@dataclass
class Running:
    """The application under test."""

    client: httpx.AsyncClient
    service: Service
    models: Mapping[str, Any]
    app: Any

    @property
    def model(self) -> Any:
        return next(iter(self.models.values()))

    @property
    def pending(self) -> int:
        """Images admitted and not yet on a device."""
        return sum(served.engine.pending for served in self.service.registry.served)

    async def metric(self, line: str) -> float:
        """The value of the exposition line that begins with ``line``."""
        text = (await self.client.get("/metrics")).text
        return next((float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0)


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for a condition; fails when it does not come."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    models: Mapping[str, Any] | None = None, *, ready: bool = True, runtime: Runtime | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """Start the application with fake models (default: one, named ``m``), stop it at the end."""
    models = {"m": FakeModel()} if models is None else models
    app = create_app(load_settings({"max_batch_size": 8, **settings}), models, runtime=runtime)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        service: Service = app.state.service
        if ready:
            await until(lambda: not service.registry.reasons())
        yield Running(client, service, models, app)
        for model in models.values():
            model.pipeline.gate.set()


def serve_next(app: Running, *models: PSC | Exception, name: str = "m") -> None:
    """Make the next loads give these."""
    upcoming = list(models)

    def load(_: Path) -> PSC:
        item = upcoming.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    registry: Any = app.service.registry
    registry._given = None
    registry._loader = load
    registry._bundles = {each: Path(each) for each in registry.names}
