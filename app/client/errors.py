"""The errors that the client raises, in one tree."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any


class ClientError(Exception):
    """The base of the errors that the client raises.

    Attributes:
        index: The position of the image at fault, or None if no single image is.
    """

    index: int | None = None


class InputError(ClientError):
    """An image cannot be read here, or the URL or the API key cannot be used; nothing was sent."""

    def __init__(self, message: str, index: int | None = None) -> None:
        self.index = index
        super().__init__(message)


class ConnectionFailed(ClientError):
    """The service could not be reached, or did not answer in time."""


class BadAnswer(ClientError):
    """The client does not understand the answer; the URL may be another service's."""


class ProblemError(ClientError):
    """The service answered with a problem.

    Attributes:
        status: The HTTP status.
        title: The problem's title, the same for all problems of its type.
        detail: What is wrong with this request.
        type: The URI of the problem's type.
        filename: The file name of the image at fault, or None if there is none.
        trace_id: The id under which the service logged the request, or None if the answer has none.
        retry_after_s: The time after which to try again, seconds, or None if the answer has none.
    """

    def __init__(self, problem: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.title = str(problem.get("title") or _reason(status))
        self.detail = str(problem.get("detail") or "")
        self.type = str(problem.get("type") or "about:blank")
        index = problem.get("index")  # Checked, because the answer may be another service's.
        self.index = index if type(index) is int and index >= 0 else None
        self.filename: str | None = problem.get("filename")
        trace = headers.get("traceresponse", "").split("-")
        self.trace_id = trace[1] if len(trace) == 4 else None
        self.retry_after_s = retry_after_seconds(headers.get("retry-after"))
        super().__init__(f"{status} {self.title}" + (f": {self.detail}" if self.detail else ""))


class Refused(ProblemError):
    """The request or one of its images cannot be used (any other 4xx)."""


class NotAllowed(ProblemError):
    """The API key is missing, unknown or not allowed to do this (401 or 403)."""


class Overloaded(ProblemError):
    """The service had no room for the request at any attempt (429)."""


class Unavailable(ProblemError):
    """The service was not ready at any attempt (503), or did not answer before its deadline (504)."""


class ServerFailed(ProblemError):
    """The service failed (any other 5xx)."""


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, as a number or a date; None if it has neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # The latter of a year that no date can have.
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
