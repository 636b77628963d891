"""Names, numbers and tables as text.

A Mac decomposes the names of files ("é" as "e" and an accent, Unicode's NFD) where most other programs compose them
(NFC), and people leave blanks at the end of a cell or folder name that nobody sees.  So names are composed, without
blanks at their ends, wherever they come from; upper and lower case, and blanks inside, remain as they are.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from psc_core.errors import DataError, UsageError, join_names, shorten

SHOWN: Final = 5  # maximum number of names in a message
_BLANK_ENDS: Final = re.compile(r"^[\s\ufeff\u200b]+|[\s\ufeff\u200b]+$")  # with what spreadsheets leave behind


def compose(name: str) -> str:
    """Return a name in Unicode's NFC, without blanks at its ends."""
    return _BLANK_ENDS.sub("", unicodedata.normalize("NFC", name))


def printable(path: str | Path) -> str:
    """Return a path as valid Unicode, with escapes such as \\xff for undecodable bytes of a file name."""
    return os.fsencode(path).decode(errors="backslashreplace")


# Control characters, ends of lines and paragraphs, and what turns the direction of the text that follows.
_CONTROLS: Final = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)], " "
)


def in_one_line(text: str) -> str:
    """Return a text of others with a blank for each character that would end the line or command a terminal."""
    return text.translate(_CONTROLS)


def class_names(classes: Any) -> tuple[str, ...]:
    """Return class names, listed or mapped to or from their labels, in the order of the labels, :func:`compose`."""
    given = _by_label(classes) if isinstance(classes, Mapping) else _listed_names(classes)
    odd = [name for name in given if not isinstance(name, str)]
    if odd:
        raise UsageError(
            f"expected classes to be names as text, got {shorten(repr(odd[0]))} among them; give the name of each "
            'label, such as classes=["cat", "dog"]'
        )
    names = tuple(compose(str(name)) for name in given)  # str: NumPy has a type of its own.
    spelled = defaultdict[str, list[str]](list)
    for name, before in zip(names, given, strict=True):
        spelled[name].append(before)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"expected classes in UTF-8, got {shorten(ascii(name))}; rename it") from error
    if "" in spelled:
        raise UsageError("expected classes with a name for each label, got an empty one; name it")
    if same := [each for each in spelled.values() if len(each) > 1]:
        # Escaped, because two forms of one name look alike.
        shown = join_names([" and ".join(ascii(str(name)) for name in each[:SHOWN]) for each in same], SHOWN)
        raise UsageError(f"expected classes that differ from each other, {shown} are one name; name each class once")
    return names


def _listed_names(classes: Any) -> list[Any]:
    """Return what is listed in a sequence, an array or a column of a data frame."""
    of_array = getattr(classes, "tolist", None)
    found = of_array() if callable(of_array) else classes
    if isinstance(found, str | bytes) or not isinstance(found, Sequence) or not len(found):
        kind = shorten(repr(classes)) if isinstance(classes, str | bytes) else type(classes).__name__
        raise UsageError(
            f"expected classes to be a list of names in the order of the labels, got {kind}; give a list such as "
            'classes=["cat", "dog"], or the mapping from names to labels'
        )
    return list(found)


def _by_label(classes: Mapping[Any, Any]) -> list[Any]:
    """Return the names in a mapping from names to labels, or from labels to names, by their labels."""
    pairs = [*classes.items()]
    orders = [{_label(label): name for name, label in pairs}, {_label(label): name for label, name in pairs}]
    wanted = {*range(len(pairs))}
    found = [names for names in orders if {*names} == wanted and all(isinstance(each, str) for each in names.values())]
    if len(found) != 1 or not pairs:
        raise UsageError(
            f"expected classes to map each name to its label, or each label to its name, with the labels 0 to "
            f"{max(0, len(pairs) - 1)} once each, got {shorten(repr(dict(pairs)))}; give the names as a list in the "
            "order of the labels"
        )
    return [found[0][label] for label in range(len(pairs))]


def _label(value: Any) -> int | None:
    """Return the label that a value is: a whole number, or its digits, as keys of JSON are; None if it is none."""
    if isinstance(value, str):
        is_index = value.isascii() and value.isdigit() and len(value) < 10
        return int(value) if is_index and str(int(value)) == value else None
    index = getattr(value, "__index__", None)
    return None if index is None or isinstance(value, bool) else int(index())


_SAID: Final = re.compile(r"sep=([,;\t|])[\r\n]*", re.IGNORECASE)  # tells Excel the delimiter
_QUOTED: Final = re.compile(r'"(?:[^"]|"")*"')
_WIDE: Final = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # what Excel calls Unicode text
_GROUPED: Final = r"[1-9][0-9]{0,2}(?:%s[0-9]{3})+"
_BLANK: Final = "[ '\u00a0\u2009\u2019\u202f]"  # what separates groups of digits and cannot be a decimal mark
_NOT_FINITE: Final = re.compile(r"[+-]?(nan|inf(inity)?)", re.IGNORECASE)


def _number_with(decimal: str, group: str) -> re.Pattern[str]:
    whole = f"(?:[0-9]+|{_GROUPED % re.escape(group)}|{_GROUPED % _BLANK})"
    return re.compile(
        rf"[+-]?(?:{whole}(?:{re.escape(decimal)}[0-9]*)?|{re.escape(decimal)}[0-9]+)(?:[eE][+-]?[0-9]+)?"
    )


_WITH_POINT: Final = _number_with(".", ",")
_WITH_COMMA: Final = _number_with(",", ".")


@dataclass(frozen=True)
class SeparatedValues:
    lines: Iterator[tuple[int, list[str]]]  # number and cells of each line that is not blank, first the header
    delimiter: str


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return one line for each row, which may lack its last cells, aligned right but for the columns in ``left``."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    formats = [f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)]
    return ["  ".join(map(str.format, formats, row)).rstrip() for row in rows]


def encoding_of(path: Path) -> str:
    with path.open("rb") as binary:
        return _WIDE.get(binary.read(2), "utf-8-sig")


@contextmanager
def open_csv(path: Path) -> Iterator[SeparatedValues]:
    """Open a ``.csv`` or ``.tsv`` in UTF-8, or in UTF-16 as Excel writes it, of any common delimiter."""
    with path.open(newline="", encoding=encoding_of(path)) as file:
        try:
            first = file.readline()
            file.seek(0)
            if "\0" in first:
                raise DataError(f"{path} is no text in UTF-8; save it as CSV in UTF-8")
            said, bare = _SAID.fullmatch(first), _QUOTED.sub("", first)
            usual = "\t,;|" if path.suffix.lower() == ".tsv" else ",;\t|"
            delimiter = said[1] if said else next((mark for mark in usual if mark in bare), usual[0])
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            if said:
                next(reader)
            yield SeparatedValues(((reader.line_num, row) for row in reader if any(map(str.strip, row))), delimiter)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}; save it as CSV in UTF-8") from error
        except UnicodeError as error:  # It is decoded in blocks, ahead of the line that is read.
            raise DataError(f"{path}: {error}; save it as CSV in UTF-8") from error


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise :class:`DataError` if a table has no columns, or two of the same name."""
    if not names:
        raise DataError(f"{path} has no columns; give a table with a header, as file,label")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path} has the column {name!r} twice; name each column once")


def number_marks(texts: Iterable[str], delimiter: str) -> str:
    """Return how the numbers of a column are written, for :func:`parse_number`, as all of its cells together show.

    A cell like "1.234,5", "1,5" or "0.500" can be read in one way only, and "12.500" then as the others.  Where all
    cells are of the latter kind, a point is a decimal point between commas, and a comma is a decimal comma between
    semicolons, which spreadsheets write where it is the decimal mark; otherwise nothing shows it.
    """
    unclear = list[str]()
    found = set[str]()
    for text in texts:
        point, comma = _readings(text)
        if point is None or comma is None:
            found |= {"."} if point is not None else {","} if comma is not None else set()
        elif point < comma or point > comma:
            unclear.append(text)
    if delimiter == "," and "," in found:
        return "."  # A decimal comma there is more likely a slip than how the table is written.
    if "," in found:
        return "" if "." in found else ","
    if found or not unclear:
        return ".,"
    has_points, has_commas = (any(mark in text for text in unclear) for mark in ".,")
    if has_points:
        return "." if delimiter in (",", "|") and not has_commas else ""
    return "," if delimiter == ";" else ""


def parse_number(text: str, marks: str = ".") -> float | None:
    """Return the number that a text is, by :func:`number_marks` (empty: unknown), or None if it is none."""
    point, comma = _readings(text)
    if marks == ".":
        return None if "," in text else point
    first, second = (comma, point) if marks == "," else (point, comma)
    if marks or first is None or second is None:
        return first if first is not None or marks == ".," else second
    if first < second or first > second:
        raise DataError(
            f"{text!r} is {first:.15g} with a decimal point and {second:.15g} with a decimal comma, and nothing beside "
            "it shows which; write numbers with a decimal point, and without another mark between their digits"
        )
    return first


def is_number(text: str) -> bool:
    return _readings(text) != (None, None)


def _readings(text: str) -> tuple[float | None, float | None]:
    """Return the number that a text is with a decimal point, and with a decimal comma."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    bare = re.sub(_BLANK, "", text)
    point = float(bare.replace(",", "")) if _WITH_POINT.fullmatch(text) else None
    comma = float(bare.replace(".", "").replace(",", ".")) if _WITH_COMMA.fullmatch(text) else None
    if _NOT_FINITE.fullmatch(text):
        point = comma = float(text)
    return point, comma


def print_any_text() -> None:
    """Let standard output show "?" for what its encoding lacks: characters of a table, bytes of a file's name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
