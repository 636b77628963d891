"""Where the served models come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.models import BundleSource, MemorySource
from app.settings import load_settings
from psc_core.errors import BundleError
from tests.app.fakes import FakeModel


def test_bundles_are_read_by_the_names_of_the_settings(shipped_bundle: Path, tmp_path: Path) -> None:
    source = BundleSource(load_settings({"bundle": f"b={shipped_bundle},a={tmp_path}", "device": "cpu"}))
    assert source.names == ("b", "a")
    assert source.load("b") is not source.load("b")
    with pytest.raises(BundleError):
        source.load("a")


def test_models_in_memory_are_those_that_were_given() -> None:
    model = FakeModel()
    source = MemorySource({"m": model})
    assert source.names == ("m",) and source.load("m") is model
