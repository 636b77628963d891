"""The table of ``make attack`` counts what is not as wanted, and the document has its cases."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from tests.attacks import kill, run
from tests.attacks.started import Started
from tests.conftest import ROOT


def test_a_case_that_is_not_as_wanted_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = (
        run.Case("good", lambda _: run.Seen("1 s", True)),
        run.Case("poor", lambda _: run.Seen("9 s", False)),
    )
    monkeypatch.setattr(run, "service", lambda *_: nullcontext(Started("http://nowhere", os.getpid())))
    monkeypatch.setattr(run, "CASES", cases)
    assert run.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop().startswith("| the most memory in all of these | ")
    assert lines[2:] == ["| good | 1 s | ok |", "| poor | 9 s | **no** |"]
    monkeypatch.setattr(run, "CASES", cases[:1])
    assert run.main() == 0


def test_the_document_has_every_case() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text().replace("`", "")
    assert [case.name for case in run.CASES[:-1] if f"| {case.name}" not in page] == []


@pytest.mark.slow
def test_kill() -> None:
    assert kill.main() == 0


@pytest.mark.slow
def test_attacks() -> None:
    assert run.main() == 0
