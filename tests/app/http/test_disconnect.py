"""Whether a client has left, asked without waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.http.body import has_disconnected

pytestmark = pytest.mark.anyio


async def test_a_client_that_has_left_and_one_that_waits() -> None:
    asked = 0
    left = asyncio.Event()

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        await left.wait()
        return {"type": "http.disconnect"}

    assert not has_disconnected(receive)
    assert not has_disconnected(receive)
    left.set()
    assert has_disconnected(receive)
    assert asked == 3


async def test_more_of_a_body_is_no_departure() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    assert not has_disconnected(receive)
