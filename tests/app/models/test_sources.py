"""Where the served models come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.models import load_bundle
from app.settings import load_settings
from psc_core.errors import BundleError


def test_bundles_are_read_by_the_names_of_the_settings(shipped_bundle: Path, tmp_path: Path) -> None:
    settings = load_settings({"bundle": f"b={shipped_bundle},a={tmp_path}", "device": "cpu"})
    assert load_bundle(settings, "b") is not load_bundle(settings, "b")
    with pytest.raises(BundleError):
        load_bundle(settings, "a")
