"""The examples in docstrings run and give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import psc_core

PUBLIC = [name for name in psc_core.__all__ if callable(getattr(psc_core, name))]

MODULES = sorted(
    module.name for module in walk_packages(psc_core.__path__, "psc_core.") if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert doctest.testmod(import_module(name)).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_show_an_example(name: str) -> None:
    assert ">>>" in (getattr(psc_core, name).__doc__ or "")
