"""The Open Inference Protocol v2 over gRPC: the routes of :mod:`app.http.v2` on a second port."""

from __future__ import annotations

from typing import Final

from psc_core.errors import needs

# Maps an HTTP status to the gRPC status code that means the same.
CODES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    415: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def check_installed() -> None:
    """Refuse to serve gRPC without its packages."""
    needs("grpc_port", "grpc", "google.protobuf", "grpc")
