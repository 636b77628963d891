"""Columns of text, and the terminal that shows them."""

import io
import sys
from pathlib import Path

import pytest

from psc_core.errors import DataError
from psc_core.tables import aligned, open_csv, parse_number, print_any_text


def test_columns_begin_or_end_below_each_other() -> None:
    rows = [["name", "x", "why"], ["a", "1.0"], ["longer", "12.0", "so"]]
    assert aligned(rows, left={0, 2}) == ["name       x  why", "a        1.0", "longer  12.0  so"]
    assert aligned(rows[1:], left=()) == ["     a   1.0", "longer  12.0  so"]
    assert aligned([]) == []


@pytest.mark.parametrize(
    ("name", "text", "lines", "decimal"),
    [
        ("t.csv", "a,b\n1,2;3\n", [(1, ["a", "b"]), (2, ["1", "2;3"])], "."),
        ("t.csv", "a;b\n\n1;2,3\n", [(1, ["a", "b"]), (3, ["1", "2,3"])], ","),
        ("t.csv", "a;b,c\n", [(1, ["a;b", "c"])], "."),
        ("t.TSV", "a;b\tc\n", [(1, ["a;b", "c"])], "."),
        ("t.csv", "\ufeffsep=;\r\na,b;c\r\n1;2\r\n", [(2, ["a,b", "c"]), (3, ["1", "2"])], ","),
        ("t.csv", "SEP=\t\na;b\tc\n", [(2, ["a;b", "c"])], "."),
        ("t.csv", "sep=", [(1, ["sep="])], "."),
        ("t.csv", "", [], "."),
    ],
)
def test_what_separates_is_said_by_the_first_line(
    tmp_path: Path, name: str, text: str, lines: list[tuple[int, list[str]]], decimal: str
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    with open_csv(tmp_path / name) as opened:
        assert ([*opened.lines], opened.decimal) == (lines, decimal)


@pytest.mark.parametrize(
    ("content", "said"),
    [("ü".encode("cp1252"), "codec can't decode byte 0xfc"), (b'a\n"b', "line 2: unexpected end of data")],
)
def test_a_file_that_is_no_table_of_text_says_how_to_save_it(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"{said}.*; save it as CSV in UTF-8"), open_csv(tmp_path / "t.csv") as opened:
        list(opened.lines)


@pytest.mark.parametrize(
    ("text", "decimal", "number"),
    [
        ("2.5", ".", 2.5),
        ("2,5", ",", 2.5),
        ("2.5", ",", 2.5),
        ("2,5", ".", None),
        ("1.234,5", ",", None),
        ("1_0", ".", None),
    ],
)
def test_a_number_has_a_decimal_point_or_the_mark_of_its_table(text: str, decimal: str, number: float | None) -> None:
    assert parse_number(text, decimal) == number


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "p → ?"), ("ascii", "p ? ?")])
def test_what_an_encoding_lacks_does_not_end_a_command(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print_any_text()
    print("p → \udce9", end="", flush=True)
    assert terminal.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]
