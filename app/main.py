"""The only wiring: settings in, ASGI application out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app import problems, tracing
from app.middleware.hosts import HostAllowList
from app.middleware.requests import Requests
from app.middleware.root_path import RootPath
from app.middleware.shortcuts import Shortcut, Shortcuts
from app.model import Model
from app.routes import admin, health, metrics, model, page, predict, v2
from app.schemas import JsonImages, ProblemDocument
from app.service import Service
from app.settings import Settings
from psc_core.version import __version__


class Application(FastAPI):
    """FastAPI behind our own front: its layers cost a prediction more than all of its own work.

    Attributes:
        front: What every request meets first; it leads to :meth:`routed` unless there is a shorter way.
    """

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The framework's own way."""
        await super().__call__(scope, receive, send)


def create_app(settings: Settings, models: Mapping[str, Model] | None = None) -> FastAPI:
    """The application.

    Args:
        settings: All settings.
        models: Serve these by name instead of the settings' bundles.

    Returns:
        An application whose lifespan loads the models; ``app.state.service`` is its :class:`Service`.

    Raises:
        ValueError: API keys that cannot be used.
    """
    service = Service(settings, lambda path: _load(settings, path), models)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    app = Application(
        title="PSC",
        version=__version__,
        description="Image classification with uncertainty from probabilistic skip connections.",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.service = service
    problems.install(app)
    shortcuts = predict.add_routes(app.router, service)
    for router in (health.router, metrics.router, model.router, admin.router, v2.router):
        app.include_router(router)
    if settings.page:
        app.include_router(page.router)
    if settings.otel:
        tracing.configure_export()
    app.front = _wrap(app.routed, shortcuts, settings, service)
    _complete_openapi(app)
    return app


def _load(settings: Settings, path: Path) -> Model:
    from psc_core.model.predictor import PSC

    return PSC.load(path, device=settings.device, allow_factories=settings.allow_factories)


def _wrap(app: ASGIApp, shortcuts: Mapping[str, Shortcut], settings: Settings, service: Service) -> ASGIApp:
    """What every request passes, innermost first."""
    app = Shortcuts(app, shortcuts)
    if settings.allowed_hosts:
        app = HostAllowList(app, allowed_hosts=settings.allowed_hosts, www_redirect=False)
    app = Requests(app, service=service)
    if settings.cors_origins:  # Outside: a browser shows a page no error without these headers.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "traceresponse", v2.HEADER],
        )
    if settings.otel:
        app = tracing.SpanMiddleware(app)
    if settings.root_path:
        app = RootPath(app, path=settings.root_path)
    return app


def _complete_openapi(app: FastAPI) -> None:
    """Add the schemas that routes refer to by name only; invalid parameters are 400, not FastAPI's 422."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path in document["paths"].values():
            for operation in path.values():
                _drop_default_422(operation["responses"])
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for kind in (ProblemDocument, JsonImages):
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _drop_default_422(responses: dict[str, Any]) -> None:
    content = responses.get("422", {}).get("content", {})
    if "HTTPValidationError" in str(content):
        del responses["422"]
