"""The application as a Ray Serve deployment: ``serve run deploy/ray/serve.yaml`` (extra ``ray``).

Ray starts, watches, replaces and scales the replicas; each is one process with its own copy of the models.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import start_http_server

from app.main import create_app, prepare_process, settle_heap
from app.metrics import PROCESS_FILES, shared_registry
from app.service import Host, Service
from app.settings import load_settings

WAITING_IMAGES: Final = "psc_waiting_images"  # the name of a replica's load among the autoscaler's metrics


class ReplicaHost(Host):
    """A process that Ray starts, checks and ends."""

    starts_ready = True

    def models_changed(self) -> None:
        settle_heap()


def build(settings: Mapping[str, Any]) -> Any:
    """Build the Serve application; the ``import_path`` of a Serve config file names this function.

    Args:
        settings: The service's settings by the names of :class:`app.settings.Settings`, which win over the ``PSC_*``
            variables of a replica's environment.  ``metrics_port`` is the port on which one replica of each node
            exposes the metrics of all replicas there.
    """
    return bind(Replica, settings)


def bind(replica: type[Replica], settings: Mapping[str, Any]) -> Any:
    """Make a Serve application of a replica class."""
    from ray import serve

    # Ray's own limit is high, so that requests wait in the replica, which can batch them, and not in Ray's proxy.
    deployment: Any = serve.deployment(serve.ingress()(replica), name="PSC", max_ongoing_requests=1024)
    return deployment.bind(dict(settings))


class Replica:
    """One process of the service; Ray calls these methods on the event loop that also runs the application."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._metrics_port: int | None = settings.pop("metrics_port", None)
        self._settings = settings
        self._revision: object = None
        self._exporter: object = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the application; Ray runs its lifespan, whose startup ends when every model is ready."""
        if PROCESS_FILES in os.environ:
            Path(os.environ[PROCESS_FILES]).mkdir(parents=True, exist_ok=True)

        settings = load_settings(self._settings)
        prepare_process(settings)
        app = create_app(settings, host=ReplicaHost())
        self._service: Service = app.state.service
        self._expose_metrics()
        return app

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Reload the bundles if ``config["revision"]`` has changed; a bundle that cannot be used changes nothing."""
        before, self._revision = self._revision, config.get("revision")
        if before not in (None, self._revision):
            await self._service.reload_quietly()

    def check_health(self) -> None:
        """Raise once the device has failed, so that Ray replaces the replica."""
        if self._service.exit_code:
            raise RuntimeError(self._service.exit_message)
        self._expose_metrics()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of images that wait for the device, for :func:`replicas_for_images`."""
        return {WAITING_IMAGES: float(sum(served.engine.pending for served in self._service.registry.served))}

    def _expose_metrics(self) -> None:
        """Listen on the node's metrics port unless another replica does; later calls take over from a dead one."""
        if self._metrics_port is None or self._exporter is not None or PROCESS_FILES not in os.environ:
            return
        with contextlib.suppress(OSError):
            self._exporter = start_http_server(self._metrics_port, registry=shared_registry())


def replicas_for_images(context: Any) -> tuple[int, dict[str, Any]]:
    """Ask for ⌈max(waiting images, requests) / ``target_ongoing_requests``⌉ replicas; Ray's autoscaling policy.

    Both are sums over all replicas.  The requests include those in front of the replicas, whose images nobody has
    counted yet, and those on the device.
    """
    waiting = sum(context.aggregated_metrics.get(WAITING_IMAGES, {}).values())
    load = max(waiting, context.total_num_requests)
    return math.ceil(load / context.config.target_ongoing_requests), {}
