"""When a request is sent again: the rules of both clients, which wait and send each in its own way.

::

    for attempt in attempts(retry):
        sleep(attempt.wait_s)
        with attempt:
            attempt.response = send(request)
    return attempt.response
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Final

import httpx

from app.client.errors import ConnectionFailed, retry_after_seconds

_RETRIED_STATUS: Final = frozenset({429, 503})
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Retry:
    """A rule for when to try a request again."""

    attempts: int = 4  # the maximum number of times that a request is sent, including the first
    max_wait_s: float = 30.0  # the longest single wait, seconds; a longer ``Retry-After`` raises at once
    base_wait_s: float = 0.25  # the first wait if the service asks for none, seconds; it doubles each time, with jitter

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_wait_s < 0 or self.base_wait_s < 0:
            raise ValueError(f"expected at least 1 attempt and waits of 0 s or more, got {self}")

    def wait_s(self, attempt: int, retry_after_s: float | None) -> float | None:
        """Return the seconds to wait after attempt number ``attempt`` (from 1), or None to give up."""
        if attempt >= self.attempts:
            return None
        if retry_after_s is not None:
            return retry_after_s if retry_after_s <= self.max_wait_s else None
        return min(self.max_wait_s, self.base_wait_s * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


DEFAULT_RETRY: Final = Retry()


class Attempt:
    """One sending of a request, within whose ``with`` block the response is set or an error of httpx is raised.

    Attributes:
        wait_s: The seconds to wait before it.
        response: The response; unset where there was none.
        error: Why there was no response.
    """

    response: httpx.Response

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.error: httpx.HTTPError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, httpx.HTTPError) else None
        return self.error is not None

    def next_wait_s(self, retry: Retry, number: int) -> float | None:
        """Return the seconds to wait after this attempt, of that number from 1; None if it was the last."""
        if self.error is not None:
            return retry.wait_s(number, None) if isinstance(self.error, _NOT_SENT) else None
        if self.response.status_code not in _RETRIED_STATUS:
            return None
        return retry.wait_s(number, retry_after_seconds(self.response.headers.get("retry-after")))


def attempts(retry: Retry) -> Iterator[Attempt]:
    """Yield the attempts at one request; the last has the response, whatever its status.

    Raises:
        ConnectionFailed: If there was no response, and no attempt is left.
    """
    wait_s: float | None = 0.0
    for number in count(1):
        if wait_s is None:
            return
        attempt = Attempt(wait_s)
        yield attempt
        wait_s = attempt.next_wait_s(retry, number)
        if wait_s is None and attempt.error is not None:
            reason, url = str(attempt.error) or type(attempt.error).__name__, attempt.error.request.url
            message = f"no answer from {url} ({reason}); is the service running there?"
            raise ConnectionFailed(message) from attempt.error
