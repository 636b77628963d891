"""Tables of text: aligned columns for a terminal, separated values in a file."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from psc_core.errors import DataError

_SAID: Final = re.compile(r"sep=([,;\t|])[\r\n]*", re.IGNORECASE)
"""The line by which a file tells Excel what separates its columns."""


@dataclass(frozen=True)
class SeparatedValues:
    """An open table of separated values."""

    lines: Iterator[tuple[int, list[str]]]  # number and cells of each line that is not blank, first the header
    decimal: str  # the decimal mark of its numbers, besides the point


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return one line for each row of cells, in columns two spaces apart; a row may lack its last cells.

    The columns in ``left`` are aligned to the left, all others to the right.
    """
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    formats = [f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)]
    return ["  ".join(map(str.format, formats, row)).rstrip() for row in rows]


@contextmanager
def open_csv(path: Path) -> Iterator[SeparatedValues]:
    """Open a ``.csv`` or ``.tsv`` in UTF-8, of any common delimiter.

    Raises:
        DataError: While it is read, if it is not in UTF-8, or a quotation mark is not closed.
        OSError: If it cannot be read.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            first = file.readline()
            file.seek(0)
            said = _SAID.fullmatch(first)
            delimiter = said[1] if said else _delimiter(path, first)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            if said:
                next(reader)
            # A spreadsheet writes semicolons where the comma is the decimal mark.
            yield SeparatedValues(((reader.line_num, row) for row in reader if row), "," if delimiter == ";" else ".")
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}; save it as CSV in UTF-8") from error
        except UnicodeDecodeError as error:  # It is decoded in blocks, ahead of the line that is read.
            raise DataError(f"{path}: {error}; save it as CSV in UTF-8") from error


def _delimiter(path: Path, header: str) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    return ";" if ";" in header and "," not in header else ","


def parse_number(text: str, decimal: str = ".") -> float | None:
    """Return the number that a text is, written with a point or with this decimal mark; None if it is none."""
    try:
        return None if "_" in text else float(text.replace(decimal, "."))  # Python reads "1_0" as 10.
    except ValueError:
        return None


def print_any_text() -> None:
    """Let standard output show "?" for what its encoding lacks: characters of a table, bytes of a file's name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
