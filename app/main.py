"""The only wiring: settings in, ASGI application out."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app.auth import ApiKeys
from app.grpc import check_installed
from app.http import problems
from app.http.middleware.access import HostAllowList, ProblemCORS
from app.http.middleware.draining import Draining
from app.http.middleware.limits import RequestLimits
from app.http.middleware.problems import ProblemResponses
from app.http.middleware.telemetry import Telemetry
from app.http.openapi import Application
from app.http.routes import feedback, live, model, operations, page, predict, review
from app.http.v2 import repository
from app.http.v2 import routes as v2
from app.http.v2.schemas import HEADER
from app.models.affordable import check_affordable
from app.observability import tracing
from app.runtime import Runtime
from app.service import Service
from app.settings import Settings
from psc_core.log.store import open_to_write
from psc_core.model.base import FittedModel
from psc_core.model.load import build_model
from psc_core.version import __version__


def create_app(
    settings: Settings, models: Mapping[str, FittedModel] | None = None, *, runtime: Runtime | None = None
) -> FastAPI:
    """The application.

    Args:
        settings: All settings.
        models: Serve these by name instead of the settings' bundles.
        runtime: The process that hosts it; by default one that needs nothing of us.

    Returns:
        An application whose lifespan loads the models; ``app.state.service`` is its :class:`Service`.

    Raises:
        UsageError: API keys that cannot be used, or an extra that is not installed.
    """
    runtime = runtime or Runtime()
    names = [name for name, _ in settings.named_bundles] if models is None else models
    load = _loader(settings) if models is None else models.__getitem__
    service = Service(settings, ApiKeys.from_settings(settings), names, load, runtime)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with runtime.running(service):
            await service.start(wait_until_ready=runtime.starts_ready or settings.workers > 1)
            async with _serving_grpc(app, service):
                yield
            await service.close()

    if settings.otel:
        tracing.configure_export()
    app = Application(
        title="PSC",
        version=__version__,
        description="Image classification and regression with uncertainty from probabilistic skip connections.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's would ask other hosts for Swagger UI.
        redoc_url=None,
        exception_handlers=problems.HANDLERS,
        telemetry={
            "tracing": settings.otel,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,  # Or FASTAPI_OTEL_AUTO_CONFIGURE would export each span a second time.
        },
    )
    app.root_path = settings.root_path.rstrip("/")  # Of a proxy that strips it, which uvicorn's root_path is not for.
    app.state.service = service
    _add_routes(app, service)
    _add_middleware(app, service)
    return app


def check(settings: Settings) -> None:
    """Raise what :func:`create_app` would, and build nothing.

    Raises:
        UsageError: API keys that cannot be used, or an extra that is not installed.
    """
    ApiKeys.from_settings(settings)
    if settings.log is not None:
        open_to_write(settings.log)
    if settings.otel:
        tracing.check_installed()
    if settings.grpc_port is not None:
        check_installed()


def _loader(settings: Settings) -> Callable[[str], FittedModel]:
    """Return a function that reads the bundle of a name."""
    bundles = dict(settings.named_bundles)

    def load(name: str) -> FittedModel:
        model = build_model(bundles[name], device=settings.device, allow_factories=settings.allow_factories)
        # Before its first image: a bundle may ask for minutes, or for all memory.
        check_affordable(model, max_batch=settings.max_batch_size, seconds=settings.warmup_seconds)
        return model.tried()

    return load


def _serving_grpc(app: FastAPI, service: Service) -> AbstractAsyncContextManager[None]:
    if service.settings.grpc_port is None:
        return nullcontext()
    from app.grpc.server import serving

    return serving(app, service)


def _add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that the settings ask for."""
    for routes in (predict, operations, model, live, v2, repository):
        app.include_router(routes.router)
    if service.log is not None:
        app.include_router(feedback.router)
        app.include_router(review.router)
    if service.settings.grpc_port is not None:
        check_installed()
        from app.grpc import methods

        app.include_router(methods.router)
    page.add_to(app, index=service.settings.page)


def _add_middleware(app: FastAPI, service: Service) -> None:
    """Add the layers that every request passes, innermost first."""
    settings = service.settings
    app.add_middleware(RequestLimits, service=service)
    app.add_middleware(ProblemResponses, metrics=service.metrics)
    if settings.allowed_hosts:
        app.add_middleware(HostAllowList, allowed_hosts=settings.allowed_hosts, www_redirect=False)
    app.add_middleware(Draining, service=service)
    app.add_middleware(Telemetry, service=service)
    if settings.cors_origins:  # Outside: a browser shows a page no error without these headers.
        app.add_middleware(
            ProblemCORS,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "traceresponse", HEADER],
        )
    if settings.access_log:  # What it changes, the client's address, is only logged.
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
