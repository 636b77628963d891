"""Every error the service can answer with, and the one table that maps errors to RFC 9457 problems.

No web framework is imported here, so the batching engine can raise these errors too; ``app/problems.py``
turns a :class:`Problem` into a response.  Details of errors outside the table never reach a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from psc_core.errors import (
    BundleError,
    DeviceError,
    ImageError,
    ImageTooLarge,
    PSCError,
    UndecodableImage,
    UnsupportedImage,
    UsageError,
)


class ServiceError(PSCError):
    """Base of the errors that only the service raises."""


class MalformedRequest(ServiceError):
    """A body or a query parameter that does not follow the interface."""


class UnattainableAlpha(ServiceError):
    """An alpha so small that the calibration images could never call an image out of distribution."""


class Unauthorized(ServiceError):
    """No API key, or one that is not known."""


class Forbidden(ServiceError):
    """A known API key that is not allowed to do this."""


class UnknownModel(ServiceError):
    """A model name that is not served."""


class SlowUpload(ServiceError):
    """A body that did not arrive within ``upload_seconds``."""


class BodyTooLarge(ServiceError):
    """A body of more than ``max_body_bytes``."""


class TooManyImages(ServiceError):
    """More than ``max_images_per_request`` images in one request."""


class UnsupportedMedia(ServiceError):
    """A content type that is none of the three accepted forms."""


class QueueFull(ServiceError):
    """No room in the queue now.

    Attributes:
        retry_after: Whole seconds after which a retry is expected to find room.
    """

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyRequests(QueueFull):
    """More than ``max_requests`` requests are being answered."""


class ReloadRunning(ServiceError):
    """A reload was asked for while another one runs."""


class NotReady(ServiceError):
    """The model is loading, warming up, draining, or its device failed."""


class DeadlineExceeded(ServiceError):
    """The answer was not there within ``deadline_seconds``."""


class InferenceFailed(ServiceError):
    """The network failed on, or gave non-finite numbers for, an image that decoded well."""


class ClientGone(ServiceError):
    """The client closed its connection; there is nobody to answer."""


class ImageRefused(ServiceError):
    """One image of a request that cannot be used.

    Attributes:
        index: Position of the image in the request, from 0.
        name: File name given by the client, if any.
        cause: Why; it decides the HTTP status.
    """

    def __init__(self, index: int, name: str | None, cause: ImageError) -> None:
        where = f"image {index}" if name is None else f"image {index} ({name!r})"
        super().__init__(f"{where}: {cause}")
        self.index = index
        self.name = name
        self.cause = cause


@dataclass(frozen=True)
class Problem:
    """An RFC 9457 problem before it is a response.

    Attributes:
        status: HTTP status.
        type: URI that names the kind of problem.
        title: Short, the same for every occurrence.
        detail: This occurrence.
        headers: Response headers beside the content type.
        extra: Extension members (``index``, ``filename``, ``retry_after_seconds``).
        reason: Label of ``psc_rejected_total``.
    """

    status: int
    type: str
    title: str
    detail: str
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The members of the problem document."""
        return {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }


TABLE: Final[Mapping[type[PSCError], tuple[int, str, str]]] = {
    MalformedRequest: (400, "malformed", "Malformed request"),
    UsageError: (400, "malformed", "Malformed request"),
    Unauthorized: (401, "unauthorized", "API key missing or unknown"),
    Forbidden: (403, "forbidden", "API key not allowed to do this"),
    UnknownModel: (404, "unknown-model", "No model of this name"),
    SlowUpload: (408, "slow-upload", "The body arrived too slowly"),
    ReloadRunning: (409, "reload-running", "A reload is running"),
    BodyTooLarge: (413, "body-too-large", "Body too large"),
    TooManyImages: (413, "too-many-images", "Too many images"),
    ImageTooLarge: (413, "image-too-large", "Image too large"),
    UnsupportedMedia: (415, "unsupported-media", "Unsupported content type"),
    UnsupportedImage: (415, "unsupported-image", "Not an image type that is read"),
    UndecodableImage: (422, "undecodable-image", "Image cannot be decoded"),
    UnattainableAlpha: (422, "unattainable-alpha", "The calibration images cannot promise this alpha"),
    BundleError: (422, "bad-bundle", "The bundle cannot be used"),
    QueueFull: (429, "queue-full", "The queue is full"),
    TooManyRequests: (429, "too-many-requests", "Too many requests at once"),
    ClientGone: (499, "client-gone", "The client closed the connection"),
    InferenceFailed: (500, "inference-failed", "The network failed on this request"),
    NotReady: (503, "not-ready", "Not ready"),
    DeviceError: (503, "device-failed", "The compute device failed"),
    DeadlineExceeded: (504, "deadline", "Deadline exceeded"),
}
"""Error class → (HTTP status, last part of the problem type, title)."""

INTERNAL: Final = (500, "internal", "Internal error")
ROUTING: Final = {
    404: ("not-found", "No such resource"),
    405: ("method-not-allowed", "Method not allowed"),
}
"""Status → the same of requests that no route takes."""

TYPE_PREFIX: Final = "urn:psc:problem:"


def problem_of(error: BaseException) -> Problem:
    """The problem that describes ``error``; anything outside :data:`TABLE` is an opaque internal error."""
    cause: BaseException = error.cause if isinstance(error, ImageRefused) else error
    row = next((TABLE[base] for base in type(cause).__mro__ if base in TABLE), None)
    if row is None:
        status, slug, title = INTERNAL
        detail = "an internal error was logged under this request's id; report it with the id"
        return Problem(status, TYPE_PREFIX + slug, title, detail, reason=slug)
    status, slug, title = row
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}
    if isinstance(error, ImageRefused):
        extra["index"] = error.index
        if error.name is not None:
            extra["filename"] = error.name
    if isinstance(cause, QueueFull):
        headers["retry-after"] = str(cause.retry_after)
        extra["retry_after_seconds"] = cause.retry_after
    if isinstance(cause, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="psc"'
    if isinstance(cause, (BodyTooLarge, SlowUpload)):
        headers["connection"] = "close"
    return Problem(status, TYPE_PREFIX + slug, title, str(error), slug, headers, extra)


def markdown_table() -> str:
    """The error table for the documentation."""
    lines = ["| status | type | title |", "| --- | --- | --- |"]
    rows = sorted({*TABLE.values(), INTERNAL, *((status, *row) for status, row in ROUTING.items())})
    lines += [f"| {status} | `{TYPE_PREFIX}{slug}` | {title} |" for status, slug, title in rows]
    return "\n".join(lines) + "\n"
