"""A running application with a client, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from app.main import create_app
from app.service import Host, Service
from app.settings import load_settings
from psc_core.model import PSC
from tests.app.fakes import FakeModel

PNG = {"content-type": "image/png"}


class Models(dict[str, Any]):
    """Models by name; once :func:`serve_next` was called, those that it was given, in order.

    Attributes:
        upcoming: What the next loads give; ``None`` gives the model of the name.
    """

    upcoming: list[PSC | Exception] | None = None

    def __getitem__(self, name: str) -> Any:
        if self.upcoming is None:
            return super().__getitem__(name)
        item = self.upcoming.pop(0)
        if isinstance(item, Exception):
            raise item
        return item


@dataclass
class Running:
    client: httpx.AsyncClient
    service: Service
    models: Models
    app: Any

    @property
    def model(self) -> Any:
        return next(iter(self.models.values()))

    @property
    def pending(self) -> int:
        """Images admitted and not yet on a device."""
        return sum(served.engine.pending for served in self.service.registry.served)

    async def metric(self, line: str) -> float:
        text = (await self.client.get("/metrics")).text
        return next((float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0)


@contextmanager
def clock() -> Iterator[Callable[[float], None]]:
    """Within the block, a function that moves the running loop's time forward by so many seconds."""
    loop: Any = asyncio.get_running_loop()
    time, ahead = loop.time, 0.0

    def advance(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    loop.time = lambda: time() + ahead
    try:
        yield advance
    finally:
        del loop.time


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    models: Mapping[str, Any] | None = None, *, ready: bool = True, host: Host | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """Start the application with fake models (default: one, named ``m``), stop it at the end."""
    models = Models({"m": FakeModel()} if models is None else models)
    app = create_app(load_settings({"max_batch_size": 8, **settings}), models, host=host)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        service: Service = app.state.service
        if ready:
            await until(lambda: not service.reasons())
        yield Running(client, service, models, app)
        for model in models.values():
            model.pipeline.check.set()


def serve_next(app: Running, *models: PSC | Exception) -> None:
    app.models.upcoming = list(models)
