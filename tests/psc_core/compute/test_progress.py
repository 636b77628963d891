from __future__ import annotations

import io
import itertools
import re
import sys

import pytest

from psc_core.compute import progress
from psc_core.compute.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_gets_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track("abc", total=3, description="pass 1")) == ["a", "b", "c"]
    assert re.fullmatch(r"pass 1 3/3 \([\d.]+/s, 0 s\)\n", capsys.readouterr().err)


def test_long_pass_logs_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    list(track(range(7), total=7, description="pass"))
    assert capsys.readouterr().err.splitlines() == [
        "pass 3/7 (0.1/s, 30 s, 40 s left)",
        "pass 6/7 (0.1/s, 60 s, 10 s left)",
        "pass 7/7 (0.1/s, 80 s)",
    ]


def test_empty_pass_logs_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([], total=0, description="pass")) == []
    assert capsys.readouterr().err == "pass 0/0 (0.0/s, 0 s)\n"


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(range(3), total=3, description="pass")) == [0, 1, 2]
    assert "\rpass: 100%" in terminal.getvalue() and "3/3" in terminal.getvalue()
