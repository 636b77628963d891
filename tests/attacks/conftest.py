"""A bundle to attack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of a real bundle."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
