"""Fixtures of the service's tests."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
