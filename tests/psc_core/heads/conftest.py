"""Fixtures for the tests of a classifier's heads and their fits."""

import pytest

from psc_core.heads import sngp


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sngp, "FEATURES", 64)
