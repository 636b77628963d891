"""Tables of text: aligned columns for a terminal, separated values in a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Sequence
from itertools import zip_longest


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return one line for each row of cells, in columns two spaces apart; a row may lack its last cells.

    The columns in ``left`` are aligned to the left, all others to the right.
    """
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    formats = [f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)]
    return ["  ".join(map(str.format, formats, row)).rstrip() for row in rows]


def delimiter_of(header: str) -> str:
    """Return what separates the columns of a CSV, by its first line.

    A spreadsheet writes semicolons where the comma is the decimal point.
    """
    return ";" if ";" in header and "," not in header else ","


def print_any_text() -> None:
    """Let standard output show "?" for what its encoding lacks: characters of a table, bytes of a file's name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
