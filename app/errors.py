"""The errors that only the service raises, and the one table that maps these and the library's to HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.errors import (
    BundleError,
    DeviceError,
    ImageError,
    ImageTooLarge,
    PSCError,
    UndecodableImage,
    UnsupportedImage,
)


class ServiceError(PSCError):
    """The base of the errors that only the service raises."""


class MalformedRequest(ServiceError):
    """The body or a query parameter does not follow the interface."""


class UnattainableAlpha(ServiceError):
    """The alpha is so small that, with so few calibration images, no image could ever be out of distribution."""


class UnavailableMap(ServiceError):
    """A map was asked for from a model that has none."""


class Unauthorized(ServiceError):
    """The request has no API key, or an unknown one."""


class Forbidden(ServiceError):
    """The service has no API key that is allowed to do this."""


class UnknownModel(ServiceError):
    """No model of this name is served."""


class UnknownImage(ServiceError):
    """The prediction log has no row of this image, or has not stored it."""


class ImageConflict(ServiceError):
    """The digest differs from that of the image in the row."""


class UnusableLabel(ServiceError):
    """The model could not have given this label."""


class LogUnavailable(ServiceError):
    """The prediction log cannot be read or written."""


class SlowUpload(ServiceError):
    """The body did not arrive within ``upload_seconds``."""


class BodyTooLarge(ServiceError):
    """The body has more than ``max_body_bytes``."""


class TooManyImages(ServiceError):
    """The request has more than ``max_images_per_request`` images."""


class TooManyPixels(ServiceError):
    """The images of the request have more than ``max_pixels_per_request`` pixels."""


class UnsupportedMedia(ServiceError):
    """The content type is none of the three accepted forms."""


class UnsupportedEncoding(ServiceError):
    """The body, or a part of it, is compressed or encoded."""


class Overloaded(ServiceError):
    """The service cannot take on more work now."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # the whole seconds after which a retry should find room


class QueueFull(Overloaded):
    """The model's queue has no room."""


class TooManyRequests(Overloaded):
    """There are more than ``max_requests`` requests, or their memory is full (:mod:`app.memory`)."""


class ReloadRunning(ServiceError):
    """A reload was asked for while another one is running."""


class NotReady(ServiceError):
    """The model is loading, warming up or draining, or its device has failed."""


class DeadlineExceeded(ServiceError):
    """There was no result within ``deadline_seconds``."""


class InferenceFailed(ServiceError):
    """The network failed on an image that was decoded without error, or gave numbers that are not finite."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"image {index}: {reason}")
        self.index = index


class ClientGone(ServiceError):
    """The client closed its connection before the answer."""


class ImageRefused(ServiceError):
    """One image of the request cannot be used."""

    def __init__(self, index: int, name: str | None, cause: ImageError) -> None:
        where = f"image {index}" if name is None else f"image {index} ({name!r})"
        super().__init__(f"{where}: {cause}")
        self.index = index
        self.name = name  # the file name that the client gave, if any
        self.cause = cause  # the reason, which decides the HTTP status


# Maps an error class to (HTTP status, last part of the problem's type, title).
TABLE: Final[Mapping[type[PSCError], tuple[int, str, str]]] = {
    MalformedRequest: (400, "malformed", "Malformed request"),
    Unauthorized: (401, "unauthorized", "API key missing or unknown"),
    Forbidden: (403, "forbidden", "API key not allowed to do this"),
    UnknownModel: (404, "unknown-model", "No model of this name"),
    UnknownImage: (404, "unknown-image", "No such image in the log"),
    SlowUpload: (408, "slow-upload", "The body arrived too slowly"),
    ReloadRunning: (409, "reload-running", "A reload is running"),
    ImageConflict: (409, "image-conflict", "The row is of another image"),
    BodyTooLarge: (413, "body-too-large", "Body too large"),
    TooManyImages: (413, "too-many-images", "Too many images"),
    TooManyPixels: (413, "too-many-pixels", "Too many pixels"),
    ImageTooLarge: (413, "image-too-large", "Image too large"),
    UnsupportedEncoding: (415, "unsupported-encoding", "Unsupported content encoding"),
    UnsupportedMedia: (415, "unsupported-media", "Unsupported content type"),
    UnsupportedImage: (415, "unsupported-image", "Unsupported image format"),
    UndecodableImage: (422, "undecodable-image", "Image cannot be decoded"),
    UnattainableAlpha: (422, "unattainable-alpha", "Alpha below the smallest p-value"),
    UnavailableMap: (422, "no-map", "No map available"),
    UnusableLabel: (422, "unusable-label", "Not a label of the model"),
    BundleError: (422, "bad-bundle", "The bundle cannot be used"),
    QueueFull: (429, "queue-full", "The queue is full"),
    TooManyRequests: (429, "too-many-requests", "Too many requests at once"),
    ClientGone: (499, "client-gone", "The client closed the connection"),
    InferenceFailed: (500, "inference-failed", "The network failed on this request"),
    NotReady: (503, "not-ready", "Not ready"),
    LogUnavailable: (503, "log-unavailable", "The prediction log cannot be used"),
    DeviceError: (503, "device-failed", "The compute device failed"),
    DeadlineExceeded: (504, "deadline", "Deadline exceeded"),
}
INTERNAL: Final = (500, "internal", "Internal error")
