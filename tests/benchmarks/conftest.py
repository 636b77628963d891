"""Runs name their data folder in the environment; tests after them must not see it."""

from __future__ import annotations

import os

import pytest

from benchmarks.data import ROOT_VARIABLE


@pytest.fixture(autouse=True)
def _keep_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, os.environ.get(ROOT_VARIABLE, ""))
    if not os.environ[ROOT_VARIABLE]:
        monkeypatch.delenv(ROOT_VARIABLE)
