"""Images with a class or a number each, from a table: a ``.csv`` or ``.tsv`` with a header, or a ``.parquet``.

The column :data:`FILE_COLUMN`, or the first one where none has this name, holds paths, absolute or relative to the
table's folder.  Another column holds a class name, a class index or a number for each image.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from unicodedata import normalize

import numpy as np
import torch

from psc_core.data.dataset import ImageDataset, labelled
from psc_core.data.sources import FileSource
from psc_core.data.targets import measured
from psc_core.errors import DataError, UsageError, shortened
from psc_core.images import SUFFIXES
from psc_core.images.preprocess import Preprocess
from psc_core.names import composed
from psc_core.tables import check_columns, is_number, number_marks, open_csv, parse_number
from psc_core.target import Target

FILE_COLUMN: Final = "file"
"""The name of the column of paths."""

MAX_DIGITS: Final = 100
"""Maximum number of digits of a class index; Python itself converts no more than 4,300."""

_INDEX: Final = re.compile(rf"(-?[0-9]{{1,{MAX_DIGITS}}})([.,]0*)?")

_MARKS: Final = {
    ".": "a decimal point",
    ".,": "commas between groups of digits",
    ",": "a decimal comma",
    "": "a decimal comma in some cells and a decimal point in others",
}
"""How numbers are written, by what :func:`psc_core.tables.number_marks` returns."""

TABLE_SUFFIXES: Final = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Column:
    """What a table says of each image, in one of its columns."""

    name: str | None = None  # None: the only one beside that of the files
    numbers: bool | None = None  # true: numbers; false: class names or indices; None: numbers are numbers, text classes
    unit: str = ""  # of the numbers


def open_table(path: Path, preprocess: Preprocess, column: Column | None) -> ImageDataset:
    """Open the images that a table lists, with what a column says of them; without one, all images form one class.

    Raises:
        DataError: If the table cannot be read, none of its files exists, or an entry is neither class nor number.
        UsageError: If the column is not in the table, or has no name and is not the only one, or classes get a unit.
    """
    columns, delimiter = _read_table(path)
    file_column = next((name for name in columns if name.casefold() == FILE_COLUMN), next(iter(columns)))
    source = _files_of(path, file_column, columns.pop(file_column))
    if column is None:
        stem = path.stem.encode(errors="replace").decode()  # One class may have any name.
        return labelled(str(path), [stem], source, torch.zeros(len(source), dtype=torch.int64), preprocess)
    name = _chosen(path, column.name, [*columns], file_column)
    entries = [*map(_cell, columns[name])]
    marks = number_marks([entry for entry in entries if isinstance(entry, str)], delimiter)
    if column.numbers is not False and _are_numbers(path, name, entries, by_request=column.numbers is True):
        values = _checked_numbers(path, name, entries, marks)
        data = measured(str(path), Target.of(name, column.unit), source, values, preprocess)
        _check_repeated(path, source, name, entries, values.tolist())
        return replace(data, notes=_reading(path, name, entries, marks))
    if column.unit:
        raise UsageError(f"{path} has classes in {name!r}, which have no unit; leave out the unit {column.unit!r}")
    are_indices = all(_is_number(entry) for entry in entries)
    labels = _class_names(path, name, entries, marks if are_indices else None)
    _check_repeated(path, source, name, entries, labels)
    # Class indices count in their own order: "10" comes after "9".
    classes = sorted({*labels}, key=(lambda label: (int(label), label)) if are_indices else None)
    position = {label: index for index, label in enumerate(classes)}
    data = labelled(str(path), classes, source, torch.tensor([position[label] for label in labels]), preprocess)
    return replace(data, names_empty_classes=False)


def _chosen(path: Path, name: str | None, others: Sequence[str], file_column: str) -> str:
    """Return the name of the column to read among those beside the files'; raises :class:`UsageError`."""
    shown = f"the columns {', '.join(others) or 'none'} beside that of the files, {file_column!r}"
    if name is None and len(others) != 1:
        raise UsageError(f"{path} has {shown}; choose one with --target")
    chosen = others[0] if name is None else composed(name)
    if chosen not in others:
        raise UsageError(f"{path} has no column {chosen!r}, it has {shown}; choose one with --target")
    return chosen


def _files_of(path: Path, column: str, entries: Sequence[Any]) -> FileSource:
    """Return the files of a table; raise :class:`DataError` if there are none, or none of them exists."""
    if not entries:
        raise DataError(f"{path} has no rows; give one for each image")
    given = [os.fsdecode(entry) if isinstance(entry, bytes) else str(entry or "") for entry in entries]
    if empty := next((row for row, name in enumerate(given, 1) if not name.strip()), 0):
        raise DataError(f"{path}: row {empty} has no file in the column {column!r}; give one, or leave the row out")
    names = _Names(path.parent)
    source = FileSource(path.parent, np.array([os.fsencode(names.on_disk(name)) for name in given], dtype=np.bytes_))
    if not any(source.path(index).exists() for index in range(len(source))):
        raise DataError(
            f"{path}: none of the files in the column {column!r} exists, the first is {source.path(0)}; give paths "
            f"with their suffixes, relative to the table's folder, in the column {FILE_COLUMN!r} or in the first one"
        )
    return source


class _Names:
    """The names of the files below a folder, which a table may have in another Unicode form than the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._listed: dict[Path, dict[str, str]] = {}  # of each folder, by their composed form

    def on_disk(self, name: str) -> str:
        """Return a path as the disk has it, or unchanged if it has none."""
        bare = name.strip()
        if (name == bare and name.isascii()) or (self._root / name).exists():  # ASCII is the same in every form.
            return name
        found = Path()
        for part in Path(bare).parts:
            found /= self._of_folder(self._root / found).get(normalize("NFC", part), part)
        return str(found)

    def _of_folder(self, folder: Path) -> dict[str, str]:
        if folder not in self._listed:
            with suppress(OSError):
                self._listed[folder] = {normalize("NFC", each.name): each.name for each in folder.iterdir()}
        return self._listed.setdefault(folder, {})


def _check_repeated(path: Path, source: FileSource, column: str, entries: Sequence[Any], said: Sequence[Any]) -> None:
    """Raise :class:`DataError` if two rows say different things of one file."""
    first: dict[str, int] = {}
    for row, value in enumerate(said):
        before = first.setdefault(os.path.normpath(source.names[row]), row)
        if said[before] != value:
            raise DataError(
                f"{path}: rows {before + 1} and {row + 1} are of the file {os.fsdecode(source.names[row])}, with "
                f"{column} {entries[before]!r} and {entries[row]!r}; keep one of them"
            )


def _is_number(entry: Any) -> bool:
    return isinstance(entry, int | float | Decimal) or (isinstance(entry, str) and is_number(entry))


def _is_missing(entry: Any) -> bool:
    """Return whether an entry is NaN, which programs write where a value is missing."""
    return entry != entry or (isinstance(entry, str) and entry.lower() == "nan")  # NaN differs from itself.


def _are_numbers(path: Path, column: str, entries: Sequence[Any], *, by_request: bool) -> bool:
    """Return whether a column holds numbers: by request, or if any entry is one, or none is anything else."""
    odd = [entry for entry in entries if not _is_number(entry)]
    percent = [entry for entry in odd if isinstance(entry, str) and entry.endswith("%") and is_number(entry[:-1])]
    if percent and (by_request or percent == odd):
        raise DataError(
            f"{path} has {column} {percent[0]!r}, a number with a sign; write the numbers alone, with the unit apart "
            "(--unit '%'), or give --task classification if these are classes"
        )
    return by_request or not odd or any(_is_number(entry) and not _is_missing(entry) for entry in entries)


def _number(path: Path, column: str, row: int, entry: Any, marks: str) -> float | None:
    """Return the number that an entry is; None if it is none."""
    try:
        return parse_number(entry, marks) if isinstance(entry, str) else float(entry) if _is_number(entry) else None
    except DataError as error:
        raise DataError(f"{path}: row {row} has {column} {error}") from error


def _checked_numbers(path: Path, column: str, entries: Sequence[Any], marks: str) -> torch.Tensor:
    """Return the numbers of a column, float64."""
    numbers = list[float]()
    for row, entry in enumerate(entries, 1):
        number = _number(path, column, row, entry, marks)
        if number is None:
            raise DataError(
                f"{path}: row {row} has {column} {entry!r}, expected a number; correct it, or give --task "
                "classification if these are classes"
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)


def _reading(path: Path, column: str, entries: Sequence[Any], marks: str) -> tuple[str, ...]:
    """Return a line that says how numbers were read, where that was found from the column."""
    odd = ",." if marks == "," else ","
    text = next((entry for entry in entries if isinstance(entry, str) and {*odd} & {*entry}), None)
    if text is None:
        return ()
    how = _MARKS[marks]
    return (f"{path}: numbers of {column!r} are read with {how}: {text!r} is {parse_number(text, marks):.15g}",)


def _class_names(path: Path, column: str, entries: Sequence[Any], marks: str | None) -> list[str]:
    """Return the class name of each row; with ``marks`` all are numbers, so these are class indices, and 3.0 is "3"."""
    names: list[str] = []
    spelled: dict[int, str] = {}
    for row, entry in enumerate(entries, 1):
        if entry is None or entry == "":
            raise DataError(f"{path}: row {row} has no {column}; give its class, or leave the image out")
        if marks is None and _is_missing(entry):
            raise DataError(
                f"{path}: row {row} has {column} {entry!r}, which programs write where a value is missing; give its "
                "class, under another name if it is called so, or leave the image out"
            )
        if not isinstance(entry, str | int | float | Decimal | date):
            raise DataError(f"{path}: row {row} has {column} {shortened(repr(entry))}, expected the name of one class")
        number = None if marks is None else _number(path, column, row, entry, marks)
        name = str(entry) if marks is None else _index(entry, number)
        if name is None:
            advice = (
                "expected a class name or index; numbers are of --task regression"
                if number is not None and math.isfinite(number) and not number.is_integer()
                else f"expected a class index of at most {MAX_DIGITS} digits, as in other rows; give its class, under "
                "another name if it is called so, or leave the image out"
            )
            raise DataError(f"{path}: row {row} has {column} {shortened(repr(entry))}, {advice}")
        if marks is not None and (other := spelled.setdefault(int(name), name)) != name:
            raise DataError(
                f"{path}: row {row} has {column} {name!r}, a row before it {other!r}; write a class one way"
            )
        names.append(name)
    return names


def _index(entry: Any, number: float | None) -> str | None:
    """Return a class index with all its digits, also of 3.0; None if it is another number."""
    if isinstance(entry, str):  # Not by way of a float, which has digits for no number above 2**53.
        found = _INDEX.fullmatch(entry)
        return found[1] if found and float(found[1]) == number else None
    return str(int(entry)) if math.isfinite(entry) and entry == int(entry) else None


def _read_table(path: Path) -> tuple[dict[str, list[Any]], str]:
    """Read the columns of a table by name; return them and what separates them, empty for a Parquet table."""
    if path.suffix.lower() == ".parquet":
        columns, delimiter = _read_parquet(path), ""
    else:
        try:
            with open_csv(path) as opened:
                rows = [row for _, row in opened.lines]
        except OSError as error:
            raise DataError(f"cannot read the table {path}: {error}") from error
        columns, delimiter = _columns_of(path, rows), opened.delimiter
    return columns, delimiter


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet
        from pyarrow.lib import ArrowException
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow; pip install 'psc[parquet]'") from error
    try:
        table = parquet.ParquetFile(path).read()
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read the table {path}: {error}") from error
    names = [composed(name) for name in table.column_names]
    check_columns(path, names)
    return {name: column.to_pylist() for name, column in zip(names, table.columns, strict=True)}


def _columns_of(path: Path, rows: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    """Return the columns of a table of text by the names in its first row, without those that are empty altogether."""
    if not rows:
        raise DataError(f"{path} is empty; give a table with a header, as file,label")
    header, *others = rows
    for number, row in enumerate(others, 1):
        if len(row) != len(header):
            raise DataError(
                f"{path}: row {number} has {len(row)} values, the header {len(header)}; correct the row, with "
                "quotation marks around a value that holds what separates the columns"
            )
    kept = [at for at, name in enumerate(header) if name.strip() or any(row[at].strip() for row in others)]
    names = [composed(header[at]) for at in kept]
    check_columns(path, names)
    if image := next((name for name in names if name.lower().endswith(SUFFIXES)), None):
        raise DataError(f"{path} has no header, its first row holds the file {image}; add the line file,label above it")
    return {name: [row[at] for row in others] for name, at in zip(names, kept, strict=True)}


def _cell(entry: Any) -> Any:
    """Return a cell without blanks at its ends; what one kind of table holds as it would be in the others."""
    if isinstance(entry, bytes):
        with suppress(UnicodeDecodeError):
            entry = entry.decode()
    if isinstance(entry, bool):
        return str(entry)
    return composed(entry) if isinstance(entry, str) else entry
