"""Fixtures of the service's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the service does."""
    return "asyncio"


@pytest.fixture(autouse=True)
def a_thread_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is quick enough for the event loop: many tests hold the network up while they look at the rest."""
    monkeypatch.setattr("app.step.QUICK_SECONDS", 0.0)
