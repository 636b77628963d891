"""The Open Inference Protocol v2 over gRPC: the routes of :mod:`app.http.v2` on a port of their own."""

from __future__ import annotations

from psc_core.errors import UsageError


def check_installed() -> None:
    """Refuse to serve gRPC without its packages.

    Raises:
        UsageError: The gRPC extra is not installed.
    """
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"grpc_port needs gRPC, but {error.name} is not installed; pip install 'psc[grpc]' or leave grpc_port unset"
        ) from error
