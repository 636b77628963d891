"""Where steps run."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["on its thread", "on the event loop"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test holds wherever steps run."""
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 0.0 if request.param == "on its thread" else 60.0)
