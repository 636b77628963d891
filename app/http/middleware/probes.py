"""What machines ask by address, again and again: probes of orchestrators, and Prometheus."""

from __future__ import annotations

import re
from typing import Final

_CALLS: Final = {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")}
_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready", *_CALLS})
_OF_MODEL: Final = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/ready")


def is_probe(path: str) -> bool:
    """Whether the path is answered however busy the service is, and whatever the ``Host`` header says."""
    return path in _PATHS or (path.endswith("/ready") and _OF_MODEL.fullmatch(path) is not None)
