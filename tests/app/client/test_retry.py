"""When a request is sent again, without a client."""

from __future__ import annotations

import httpx
import pytest

from app.client.errors import ConnectionFailed
from app.client.retry import Retry, attempts

URL = "http://host/predict"


def waits(outcomes: list[httpx.Response | Exception], retry: Retry) -> list[float]:
    """The seconds before each sending, where these come of them."""
    found, left = [], iter(outcomes)
    for attempt in attempts(retry):
        found.append(attempt.wait_s)
        with attempt:
            outcome = next(left)
            if isinstance(outcome, Exception):
                raise outcome
            attempt.response = outcome
    assert attempt.response is outcomes[-1]
    return found


def failed(kind: type[httpx.TransportError]) -> httpx.TransportError:
    return kind("refused", request=httpx.Request("POST", URL))


def busy(seconds: int) -> httpx.Response:
    return httpx.Response(429, headers={"retry-after": str(seconds)})


def test_waits_as_long_as_asked_until_there_is_an_answer() -> None:
    assert waits([httpx.Response(200)], Retry()) == [0.0]
    assert waits([busy(3), busy(1), httpx.Response(404)], Retry()) == [0.0, 3.0, 1.0]


def test_the_last_response_is_the_answer_whatever_its_status() -> None:
    assert waits([busy(3), busy(4)], Retry(attempts=2)) == [0.0, 3.0]
    assert waits([busy(31)], Retry(max_wait_s=30)) == [0.0]


def test_waits_double_where_nothing_was_sent() -> None:
    for kind in (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
        first, second, third = waits([failed(kind), failed(kind), httpx.Response(200)], Retry(base_wait_s=8))
        assert first == 0 and 4 <= second <= 8 and 8 <= third <= 16


def test_an_attempt_without_a_response_that_may_have_been_sent_is_the_last() -> None:
    with pytest.raises(ConnectionFailed, match=f"no answer from {URL} .refused.") as caught:
        waits([failed(httpx.ReadTimeout), httpx.Response(200)], Retry())
    assert isinstance(caught.value.__cause__, httpx.ReadTimeout)


def test_other_errors_are_none_of_the_connection() -> None:
    with pytest.raises(KeyError):
        waits([KeyError("a bug")], Retry())


def test_rejects_rules_that_never_send() -> None:
    with pytest.raises(ValueError, match="at least 1 attempt"):
        Retry(attempts=0)
