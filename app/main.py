"""Build the application of its settings; set up the process that hosts it, and end it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.compiler.config
from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app import errors as problems
from app import tracing
from app.http import feedback, model, v2
from app.http.middleware import (
    DirectRoutes,
    HostAllowList,
    ProblemCORS,
    ProblemResponses,
    RequestLimits,
    Telemetry,
    is_probe,
)
from app.metrics import forget_dead_processes
from app.service import Host, Service
from app.settings import Settings
from psc_core import __version__
from psc_core.allocator import keep_freed_memory, release_freed_memory
from psc_core.errors import needs
from psc_core.images.decode import mute_codecs
from psc_core.model import FittedModel

logger = logging.getLogger("psc.runtime")

# The longest time after SIGTERM in which requests are still accepted; each is answered with ``Connection: close``.
LINGER_SECONDS: Final = 1.0
# The longest time that the event loop keeps the interpreter's lock while the device thread waits for it. Python's
# default of 5 ms would delay the device by as much between any two operations.
_SWITCH_SECONDS: Final = 5e-4
_THREAD_SECONDS: Final = 2.0  # the longest time that the end of the process waits for its threads
# The maximum number of shapes compiled in one process: the buckets of all models, again after every reload.
_MAX_COMPILED_SHAPES: Final = 1 << 16


def prepare_process(settings: Settings) -> None:
    """Set up what belongs to the process, not the application: import path, log, heap, threads, compiler, metrics."""
    if settings.allow_factories:
        sys.path.append(str(Path.cwd()))  # At the end: an installed package wins over a file of the same name.
    logging.captureWarnings(True)
    mute_codecs()
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    if settings.compile:
        allow_compiled_shapes()
    forget_dead_processes()


def allow_compiled_shapes() -> None:
    """Let ``torch.compile`` keep every batch size of every model; its default is 8 shapes."""
    torch.compiler.config.recompile_limit = _MAX_COMPILED_SHAPES
    torch.compiler.config.accumulated_recompile_limit = _MAX_COMPILED_SHAPES


def end_threads(code: int) -> None:
    """Wait until this process's threads have ended; if one does not, end the process with ``code``.

    The interpreter ends a daemon thread where it next asks for the lock, and inside of PyTorch's C++ that aborts the
    process.  Such a thread is warming up a model that nobody waits for, computes a long batch or hangs.
    Its requests have been answered and the log is written, so only buffers are left to flush.
    """
    deadline = time.monotonic() + _THREAD_SECONDS
    for thread in threading.enumerate():
        if not (thread.daemon and thread.name.startswith("psc-")):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            logger.warning("%s does not end, so the process ends without it", thread.name)
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # It is closed, full or None.
                    stream.flush()
            os._exit(code)


def settle_heap() -> None:
    """Exempt the objects of imports and models from garbage collection, and free the memory of replaced models.

    There are hundreds of thousands of such objects, and each full collection would walk them all.  Frozen objects are
    never collected, so this runs again whenever models were replaced.  The memory of replaced models would otherwise
    stay with the process (:func:`prepare_process` keeps it for the next batch), in holes that may be too small for a
    large tensor of the next model.
    """
    gc.unfreeze()
    gc.collect()
    release_freed_memory()
    gc.freeze()


# As :class:`app.service.ApiKeys` reads a key.
_SECURITY_SCHEMES: Final = {
    "X-API-Key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "Bearer": {"type": "http", "scheme": "bearer"},
}


class Application(FastAPI):
    """FastAPI with an OpenAPI document that has problems and keys, and no 422: invalid parameters are 400 here."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        components = document.setdefault("components", {})
        components["securitySchemes"] = _SECURITY_SCHEMES
        schemas = components.setdefault("schemas", {})
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answers = operation["responses"]
                for status in _common_statuses(method, path):
                    answers.setdefault(str(status), _error_answer(path, status))
                if "HTTPValidationError" in str(answers.get("422", {}).get("content", {})):
                    del answers["422"]
                # What can answer 403 needs a key always, what only predicts where there are keys.
                if "403" in answers or ("401" in answers and self.state.service.keys.predict):
                    operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas[problems.ProblemDocument.__name__] = problems.ProblemDocument.model_json_schema()
        return document


def _common_statuses(method: str, path: str) -> list[int]:
    """Return the statuses with which a route may be refused whatever it does."""
    if path in ("/healthz", "/v2/health/live"):
        return []
    return [503] if is_probe(path) else [*([413] if method == "post" else []), 429, 503]


def _error_answer(path: str, status: int) -> dict[str, Any]:
    answer = problems.responses(status)[status]
    if path.startswith("/v2"):
        answer["content"] = {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{v2.ErrorDocument.__name__}"}}
        }
    return answer


def linger_seconds(settings: Settings) -> float:
    """Return how many seconds after SIGTERM requests are still accepted."""
    return min(LINGER_SECONDS, settings.answer_seconds / 2)


def create_app(
    settings: Settings, models: Mapping[str, FittedModel] | None = None, *, host: Host | None = None
) -> FastAPI:
    """Build the application, whose lifespan loads the models; ``app.state.service`` is its :class:`Service`.

    ``models`` are served by name in place of the settings' bundles.  ``host`` is the process; one that manages itself
    by default.  Raises :class:`UsageError` if API keys or the prediction log cannot be used, or an extra is missing.
    """
    host = host or Host()
    service = Service(settings, models, host)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with host.running(service):
            await service.start()
            try:
                async with AsyncExitStack() as stack:
                    if settings.grpc_port is not None:
                        from app.grpc import serving

                        await stack.enter_async_context(serving(app, service))
                    yield
            finally:  # Also if a second Ctrl-C has cancelled this: rows of the log are written, and threads end.
                await service.close()
                if settings.otel:
                    await asyncio.to_thread(tracing.flush)

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
        dependencies=[Depends(_check_end)],
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
    _add_middleware(app, service, _add_routes(app, service))
    return app


async def _check_end(request: Request) -> None:
    """Refuse a path with a line end behind it, which Starlette takes for the path without."""
    if request.scope["path"].endswith("\n"):
        raise HTTPException(404)


def _add_routes(app: FastAPI, service: Service) -> list[BaseRoute]:
    """Add the routes, and return those of the API; some are there only if the settings ask for them."""
    routers = [model.predict_router, model.operations_router, model.router, model.live_router]
    routers += [v2.router, v2.repository_router]
    if service.log is not None:
        routers += [feedback.router, feedback.review_router]
    if service.settings.grpc_port is not None:
        needs("grpc_port", "grpc", "google.protobuf", "grpc")
        from app import grpc

        routers.append(grpc.router)
    for router in routers:
        app.include_router(router)
    model.add_to(app, index=service.settings.page)
    return [route for router in routers for route in router.routes]


def _add_middleware(app: FastAPI, service: Service, routes: Sequence[BaseRoute]) -> None:
    """Add the middleware, innermost first."""
    settings = service.settings
    if not settings.otel:  # FastAPI makes the spans.
        app.add_middleware(DirectRoutes, routes=model.predict_router.routes)
    app.add_middleware(RequestLimits, service=service)
    app.add_middleware(ProblemResponses, metrics=service.metrics)
    if settings.allowed_hosts:
        app.add_middleware(HostAllowList, allowed_hosts=settings.allowed_hosts, www_redirect=False)
    app.add_middleware(Telemetry, service=service, routes=routes)
    if settings.cors_origins:  # Outside the one that answers errors: a browser hides an answer without these headers.
        app.add_middleware(ProblemCORS, origins=settings.cors_origins)
    if settings.access_log:  # It only replaces the client's address, which nothing but the access log reads.
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
