"""The Open Inference Protocol v2 over gRPC: the routes of :mod:`app.http.v2` on a port of their own."""

from __future__ import annotations

from psc_core.errors import needs


def check_installed() -> None:
    """Refuse to serve gRPC without its packages.

    Raises:
        UsageError: The gRPC extra is not installed.
    """
    needs("grpc_port", "grpc", "google.protobuf", "grpc")
