"""``docs/architecture.md``: every step of the two walks names a function that exists, each once."""

from __future__ import annotations

import re
from pkgutil import resolve_name

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = [
    re.findall(r"`([\w.]+)`", walk)
    for walk in re.findall(r"^## One .*?\| --- \| --- \|$(.*?)(?=^## )", PAGE, re.M | re.S)
]


def test_two_walks_pass_each_function_once() -> None:
    assert len(WALKS) == 2
    for names in WALKS:
        assert len(names) == len(set(names))
        assert len(names) > 15


@pytest.mark.parametrize("name", [name for names in WALKS for name in names if name.startswith(("app.", "psc_core."))])
def test_step_exists(name: str) -> None:
    assert callable(resolve_name(name))
