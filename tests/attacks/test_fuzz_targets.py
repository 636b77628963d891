"""The targets of ``python -m tests.attacks.fuzz`` hold for their seeds and for damaged ones, without atheris."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attacks.fuzz.__main__ import TARGETS, main
from tests.conftest import ROOT


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_damaged_seeds(name: str) -> None:
    target = importlib.import_module(f"tests.attacks.fuzz.{name}")
    for seed in target.SEEDS:
        target.check(seed)

    @given(st.sampled_from(target.SEEDS), st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6))
    def damaged(seed: bytes, at: int, put: bytes, dropped: int) -> None:
        target.check(seed[:at] + put + seed[at + dropped :])

    damaged()


def test_without_atheris_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["v2"]) == 0
    assert "atheris is not installed" in capsys.readouterr().out


def test_make_nightly_fuzzes_every_target() -> None:
    (targets,) = re.findall(r"^FUZZED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets.split() == list(TARGETS)
