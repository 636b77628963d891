"""The errors that the client raises, one tree of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any


class ClientError(Exception):
    """Base of what this module raises.

    Attributes:
        index: Position of the image at fault, if one is.
    """

    index: int | None = None


class InputError(ClientError):
    """An image that cannot be read here, or a URL or an API key that cannot be used; nothing was sent."""

    def __init__(self, message: str, index: int | None = None) -> None:
        self.index = index
        super().__init__(message)


class ConnectionFailed(ClientError):
    """The service could not be reached, or did not answer in time."""


class BadAnswer(ClientError):
    """An answer this client does not understand; the URL may be another service's."""


class ProblemError(ClientError):
    """The service refused the request.

    Attributes:
        status: HTTP status.
        title: Kind of problem.
        detail: The fault of this request.
        type: URI of the kind.
        filename: Its name, if it has one.
        trace_id: Id under which the service logged it, if it said so.
        retry_after_s: Seconds after which the service asks to try again, if it does.
    """

    def __init__(self, problem: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.title = str(problem.get("title") or _reason(status))
        self.detail = str(problem.get("detail") or "")
        self.type = str(problem.get("type") or "about:blank")
        index = problem.get("index")  # Another service may say anything.
        self.index = index if type(index) is int and index >= 0 else None
        self.filename: str | None = problem.get("filename")
        trace = headers.get("traceresponse", "").split("-")
        self.trace_id = trace[1] if len(trace) == 4 else None
        self.retry_after_s = retry_after_seconds(headers.get("retry-after"))
        super().__init__(f"{status} {self.title}" + (f": {self.detail}" if self.detail else ""))


class Refused(ProblemError):
    """400–499 other than below: the request or one of its images cannot be used."""


class NotAllowed(ProblemError):
    """401 or 403: the API key is missing, unknown, or not for this."""


class Overloaded(ProblemError):
    """429: the queue stayed full through every attempt."""


class Unavailable(ProblemError):
    """503 or 504: not ready through every attempt, or no answer before the service's deadline."""


class ServerFailed(ProblemError):
    """Any other 5xx: a fault of the service."""


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header, a number or an HTTP date; ``None`` when absent or neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _reason(status: int) -> str:
    """The standard phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
