"""Fixtures of the service's tests."""

from collections.abc import AsyncIterator

import pytest

from tests.app.support import Running, running


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def app() -> AsyncIterator[Running]:
    """The application with one fake model, named ``m``."""
    async with running() as started:
        yield started
