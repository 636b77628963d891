"""What machines ask by address, again and again: probes of orchestrators, and Prometheus."""

from __future__ import annotations

from typing import Final

_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"})


def is_probe(path: str) -> bool:
    """Whether the path is answered however busy the service is, and whatever the ``Host`` header says."""
    return path in _PATHS or (path.startswith("/v2/models/") and path.endswith("/ready"))
