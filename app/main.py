"""Put the application together: settings in, ASGI application out.  No other module wires parts to each other."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from fastapi import FastAPI
from starlette.exceptions import HTTPException
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
from app.log.writer import LogWriter
from app.memory import MemoryBudget, process_memory
from app.models.registry import Registry
from app.models.served import ModelStarter
from app.models.sources import BundleSource, MemorySource
from app.observability import tracing
from app.observability.metrics import Metrics
from app.runtime import Runtime
from app.service import Host, Service
from app.settings import Settings
from psc_core.log.store import open_to_write
from psc_core.model.base import FittedModel
from psc_core.version import __version__


def create_app(
    settings: Settings, models: Mapping[str, FittedModel] | None = None, *, runtime: Runtime | None = None
) -> FastAPI:
    """Build the application.

    Args:
        settings: All settings.
        models: Models by name, served instead of the settings' bundles.
        runtime: The process that hosts the application; by default one that manages itself.

    Returns:
        An application whose lifespan loads the models; ``app.state.service`` is its :class:`Service`.

    Raises:
        UsageError: If the API keys or the prediction log cannot be used, or an extra is not installed.
    """
    runtime = runtime or Runtime()
    service = make_service(settings, models, runtime)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with runtime.running(service):
            await service.start(wait_until_ready=runtime.starts_ready or settings.workers > 1)
            try:
                async with _serving_grpc(app, service):
                    yield
            finally:  # Also if a second Ctrl-C has cancelled this: rows of the log are written, and threads end.
                await service.close()

    if settings.otel:
        tracing.configure_export()
    app = Application(
        title="PSC",
        version=__version__,
        description="Image classification and regression with uncertainty from probabilistic skip connections.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own page loads Swagger UI from another host.
        redoc_url=None,
        exception_handlers={HTTPException: problems.on_http_exception},
        telemetry={
            "tracing": settings.otel,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,  # Or FASTAPI_OTEL_AUTO_CONFIGURE would export each span a second time.
        },
    )
    # For a proxy that strips the prefix, which uvicorn's own root_path is not for.
    app.root_path = settings.root_path.rstrip("/")
    app.state.service = service
    _add_routes(app, service)
    _add_middleware(app, service)
    return app


def make_service(settings: Settings, models: Mapping[str, FittedModel] | None, host: Host) -> Service:
    """Make the parts of a service, none of which is started; takes the arguments of :func:`create_app`.

    Raises:
        UsageError: If the API keys or the prediction log cannot be used.
    """
    keys, metrics = ApiKeys.from_settings(settings), Metrics()
    available = process_memory(settings.workers)
    memory = MemoryBudget(settings.max_buffered_bytes, available, max_pixels=settings.max_pixels)
    log = None if settings.log is None else LogWriter(open_to_write(settings.log), settings, metrics)
    source = BundleSource(settings) if models is None else MemorySource(models)
    starter = ModelStarter(settings, metrics, memory, log)
    registry = Registry(source, starter, metrics, retire_within_s=settings.deadline_seconds)
    return Service(settings, keys, metrics, memory, log, registry, host)


def check(settings: Settings) -> None:
    """Raise the errors that :func:`create_app` would raise, without building anything.

    Raises:
        UsageError: If the API keys or the prediction log cannot be used, or an extra is not installed.
    """
    ApiKeys.from_settings(settings)
    if settings.log is not None:
        open_to_write(settings.log)
    if settings.otel:
        tracing.check_installed()
    if settings.grpc_port is not None:
        check_installed()


def _serving_grpc(app: FastAPI, service: Service) -> AbstractAsyncContextManager[None]:
    if service.settings.grpc_port is None:
        return nullcontext()
    from app.grpc.server import serving

    return serving(app, service)


def _add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes; some are there only if the settings ask for them."""
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
    """Add the middleware, innermost first."""
    settings = service.settings
    app.add_middleware(RequestLimits, service=service)
    app.add_middleware(ProblemResponses, metrics=service.metrics)
    if settings.allowed_hosts:
        app.add_middleware(HostAllowList, allowed_hosts=settings.allowed_hosts, www_redirect=False)
    app.add_middleware(Draining, service=service)
    app.add_middleware(Telemetry, service=service)
    if settings.cors_origins:  # Outside the one that answers errors: a browser hides an answer without these headers.
        app.add_middleware(
            ProblemCORS,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "traceresponse", HEADER],
        )
    if settings.access_log:  # It only replaces the client's address, which nothing but the access log reads.
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
