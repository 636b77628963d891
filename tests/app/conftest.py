"""Fixtures of the service's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the service does."""
    return "asyncio"
