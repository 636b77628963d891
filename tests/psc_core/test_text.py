from __future__ import annotations

import io
import sys
import unicodedata
from contextlib import suppress
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from psc_core.errors import DataError, UsageError
from psc_core.text import class_names, compose, number_marks, open_csv, parse_number, print_any_text


@pytest.mark.parametrize(
    ("name", "text", "lines", "delimiter"),
    [
        ("t.csv", "a,b\n1,2;3\n", [(1, ["a", "b"]), (2, ["1", "2;3"])], ","),
        ("t.csv", "a;b\n\n1;2,3\n", [(1, ["a", "b"]), (3, ["1", "2,3"])], ";"),
        ("t.csv", "a;b,c\n", [(1, ["a;b", "c"])], ","),
        ("t.csv", '"a;""b"\tc\n', [(1, ['a;"b', "c"])], "\t"),
        ("t.csv", "a\tb\r\n1,5\t2\r\n", [(1, ["a", "b"]), (2, ["1,5", "2"])], "\t"),
        ("t.csv", "a,b\n1,2\n,\n \n", [(1, ["a", "b"]), (2, ["1", "2"])], ","),
        ("t.TSV", "a;b\tc\n", [(1, ["a;b", "c"])], "\t"),
        ("t.csv", "\ufeffsep=;\r\na,b;c\r\n1;2\r\n", [(2, ["a,b", "c"]), (3, ["1", "2"])], ";"),
        ("t.csv", "SEP=\t\na;b\tc\n", [(2, ["a;b", "c"])], "\t"),
        ("t.csv", "sep=", [(1, ["sep="])], ","),
        ("t.csv", "", [], ","),
    ],
)
def test_what_separates_is_said_by_the_first_line(
    tmp_path: Path, name: str, text: str, lines: list[tuple[int, list[str]]], delimiter: str
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    with open_csv(tmp_path / name) as opened:
        assert ([*opened.lines], opened.delimiter) == (lines, delimiter)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_encodings_of_a_spreadsheet_are_read(tmp_path: Path, encoding: str, end: str) -> None:
    (tmp_path / "t.csv").write_bytes(f"file\tGr\u00f6\u00dfe{end}\u732b\t1{end}".encode(encoding))
    with open_csv(tmp_path / "t.csv") as opened:
        assert [row for _, row in opened.lines] == [["file", "Gr\u00f6\u00dfe"], ["\u732b", "1"]]


@pytest.mark.parametrize(
    ("content", "said"),
    [("ü".encode("cp1252"), "codec can't decode byte 0xfc"), (b'a\n"b', "line 2: unexpected end of data")],
)
def test_a_file_that_is_no_table_of_text_says_how_to_save_it(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"{said}.*; save it as CSV in UTF-8"), open_csv(tmp_path / "t.csv") as opened:
        list(opened.lines)


@pytest.mark.parametrize(
    ("text", "marks", "number"),
    [
        ("2.5", ".", 2.5), ("2,5", ",", 2.5), ("2,5", ".", None), ("1.234,5", ",", 1234.5), ("1_0", ".", None),
        ("12.500", ",", 12500.0), ("12,500", ".,", 12500.0), ("-1,234.5e2", ".,", -123450.0),
        (" 12 500,25 ", ",", 12500.25), ("1\u202f234\u202f567", ".", 1234567.0), ("12'500.5", ".", 12500.5),
        ("\u22123", ".", -3.0), ("1,5", "", 1.5), ("1.23,456", ",", None), ("12 50", ".", None), ("45%", ".", None),
        ("", ".", None), ("1e5", ",", 1e5),
    ],
)  # fmt: skip
def test_a_number_is_read_by_the_marks_of_its_column(text: str, marks: str, number: float | None) -> None:
    assert parse_number(text, marks) == number


@pytest.mark.parametrize(
    ("column", "delimiter", "numbers"),
    [
        (["12.500", "1.234,5"], ";", [12500.0, 1234.5]),
        (["12.500", "1,5", "3"], ";", [12500.0, 1.5, 3.0]),
        (["12.500", "0.125"], ";", [12.5, 0.125]), (["12,500", "3,250"], ";", [12.5, 3.25]),
        (["12.500", "3.250"], ",", [12.5, 3.25]), (["12.500", "3.250"], "\t", None),
        (["12,500", "3.5"], ",", [12500.0, 3.5]), (["1,5", "2.5"], ";", [1.5, 2.5]), (["1,5"], ",", [None]),
        (["12.500", "cat"], ",", [12.5, None]), (["12.500", "12.500"], ";", None), (["12,500", "3"], ",", None),
        (["12.500", "3,250"], ";", None), (["12.500", "1,5", "1.5"], ";", None),
    ],
)  # fmt: skip
def test_the_whole_column_shows_how_its_numbers_are_written(
    column: list[str], delimiter: str, numbers: list[float | None] | None
) -> None:
    marks = number_marks(column, delimiter)
    if numbers is None:
        with pytest.raises(DataError, match=r"12[.,]500"):
            [parse_number(text, marks) for text in column]
    else:
        assert [parse_number(text, marks) for text in column] == numbers


@given(
    values=st.lists(st.decimals(-(10**7), 10**7, places=3), min_size=1), delimiter=st.sampled_from(["", ";", "\t", ","])
)
def test_no_column_with_a_point_and_groups_is_misread(values: list[Decimal], delimiter: str) -> None:
    """Each is read as it was written, or not at all."""
    written = [f"{value:,.3f}" for value in values]
    marks = number_marks(written, delimiter)
    for text, value in zip(written, values, strict=True):
        with suppress(DataError):
            assert parse_number(text, marks) in (float(value), None)


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "p → ?"), ("ascii", "p ? ?")])
def test_what_an_encoding_lacks_ends_no_command(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print_any_text()
    print("p → \udce9", end="", flush=True)
    assert terminal.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(compose)
NAMES = st.lists(TEXT, min_size=1, max_size=6, unique_by=compose)
BLANKS = st.text("  \t\u00a0\u2009\ufeff\u200b", max_size=3)


@given(name=TEXT, form=st.sampled_from(["NFC", "NFD"]), before=BLANKS, after=BLANKS)
def test_forms_and_blanks_at_the_ends_make_no_difference(name: str, form: Any, before: str, after: str) -> None:
    once = compose(name)
    assert compose(before + unicodedata.normalize(form, name) + after) == once == compose(once)
    assert unicodedata.is_normalized("NFC", once) and once == once.strip()


@given(names=NAMES, data=st.data())
def test_a_mapping_is_ordered_by_the_labels(names: list[str], data: st.DataObject) -> None:
    assume(not any(name.isdigit() for name in names))
    pairs = data.draw(st.permutations([*enumerate(names)]))
    kind = data.draw(st.sampled_from([int, np.int64, str]))
    wanted = tuple(map(compose, names))
    assert class_names({kind(label): name for label, name in pairs}) == wanted
    assert class_names({name: kind(label) for label, name in pairs}) == wanted


@given(names=NAMES)
def test_a_sequence_keeps_its_order(names: list[str]) -> None:
    wanted = tuple(map(compose, names))
    assert class_names(names) == class_names(tuple(names)) == class_names(np.array(names, dtype=object)) == wanted
    assert all(type(name) is str for name in class_names(np.array(["a", "b"])))


@pytest.mark.parametrize(
    "classes",
    [
        "abc", b"abc", 3, None, [], {}, [0, 1], ["a", 1], ["a", None], [None], ["a", ""], ["a", " \u00a0"], ["a", "a"],
        ["caf\u00e9", "cafe\u0301"], ["a", "a "], ["a", "\ud800"], {"a", "b"}, {"a": 0}.keys(), iter(["a", "b"]),
        {0: "a", 2: "b"}, {1: "a", 2: "b"}, {"a": 0, "b": 0}, {"a": 0, "b": 1.5}, {"a": "b"}, {0: 1, 1: 0},
        {"a": True, "b": False}, {"0": "1", "1": "0"}, {-1: "a", 0: "b"}, [["a"], ["b"]], np.arange(3), {0: 5, 1: "b"},
        {"01": "a", "0": "b"}, np.array([["a", "b"]]),
    ],
    ids=count(),  # The text of a set or of an iterator is another in every process.
)  # fmt: skip
def test_what_are_no_names_is_refused(classes: Any) -> None:
    with pytest.raises(UsageError, match="classes"):
        class_names(classes)
