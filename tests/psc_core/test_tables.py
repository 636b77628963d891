"""Columns of text, and the terminal that shows them."""

import io
import sys

import pytest

from psc_core.tables import aligned, delimiter_of, print_any_text


def test_columns_begin_or_end_below_each_other() -> None:
    rows = [["name", "x", "why"], ["a", "1.0"], ["longer", "12.0", "so"]]
    assert aligned(rows, left={0, 2}) == ["name       x  why", "a        1.0", "longer  12.0  so"]
    assert aligned(rows[1:], left=()) == ["     a   1.0", "longer  12.0  so"]
    assert aligned([]) == []


@pytest.mark.parametrize(("header", "delimiter"), [("a,b", ","), ("a;b", ";"), ("a;b,c", ","), ("a", ",")])
def test_semicolons_separate_where_no_comma_does(header: str, delimiter: str) -> None:
    assert delimiter_of(header) == delimiter


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "p → ?"), ("ascii", "p ? ?")])
def test_what_an_encoding_lacks_does_not_end_a_command(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print_any_text()
    print("p → \udce9", end="", flush=True)
    assert terminal.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]
