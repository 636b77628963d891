"""The errors that only the service raises; :mod:`app.http.problems` maps them, and the library's, to HTTP."""

from __future__ import annotations

from psc_core.errors import ImageError, PSCError


class ServiceError(PSCError):
    """Base of the errors that only the service raises."""


class MalformedRequest(ServiceError):
    """A body or a query parameter that does not follow the interface."""


class UnattainableAlpha(ServiceError):
    """An alpha so small that no image could ever be out of distribution by the calibration images."""


class UnavailableMap(ServiceError):
    """A map that is asked for without an explanation, or of a model that has none."""


class Unauthorized(ServiceError):
    """No API key, or one that is not known."""


class Forbidden(ServiceError):
    """A known API key that is not allowed to do this."""


class UnknownModel(ServiceError):
    """A model name that is not served."""


class UnknownImage(ServiceError):
    """An image of which the prediction log has no row."""


class ImageConflict(ServiceError):
    """A digest that is not that of the row's image."""


class UnusableLabel(ServiceError):
    """A label that the model could not have given."""


class LogUnavailable(ServiceError):
    """The prediction log cannot be read or written."""


class SlowUpload(ServiceError):
    """A body that did not arrive within ``upload_seconds``."""


class BodyTooLarge(ServiceError):
    """A body of more than ``max_body_bytes``."""


class TooManyImages(ServiceError):
    """More than ``max_images_per_request`` images in one request."""


class TooManyPixels(ServiceError):
    """More than ``max_pixels_per_request`` pixels in the images of one request."""


class UnsupportedMedia(ServiceError):
    """A content type that is none of the three accepted forms."""


class Overloaded(ServiceError):
    """More work than the service takes on now.

    Attributes:
        retry_after: Whole seconds after which a retry is expected to find room.
    """

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Overloaded):
    """No room in a model's queue."""


class TooManyRequests(Overloaded):
    """More requests than ``max_requests``, or no room for another in the memory of requests (:mod:`app.memory`)."""


class ReloadRunning(ServiceError):
    """A reload was asked for while another one runs."""


class NotReady(ServiceError):
    """The model is loading, warming up, draining, or its device failed."""


class DeadlineExceeded(ServiceError):
    """No result within ``deadline_seconds``."""


class InferenceFailed(ServiceError):
    """The network failed on, or gave non-finite numbers for, an image that decoded well.

    Attributes:
        index: Position of the image in the request, from 0.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"image {index}: {reason}")
        self.index = index


class ClientGone(ServiceError):
    """The client closed its connection before the answer."""


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
