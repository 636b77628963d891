"""Runs name their data folder in the environment; tests after them must not see it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _keep_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSC_DATA", "")
    monkeypatch.delenv("PSC_DATA")
