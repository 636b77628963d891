"""Images with a class or a number each, from a table: a ``.csv`` or ``.tsv`` with a header, or a ``.parquet``.

The column :data:`FILE_COLUMN`, or the first one where none has this name, holds paths, absolute or relative to the
table's folder.  Another column holds a class name, a class index or a number for each image.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from psc_core.data.dataset import ImageDataset, labelled
from psc_core.data.sources import FileSource
from psc_core.data.targets import measured
from psc_core.errors import DataError, UsageError, shortened
from psc_core.images.preprocess import Preprocess
from psc_core.tables import open_csv, parse_number
from psc_core.target import Target

FILE_COLUMN: Final = "file"
"""The name of the column of paths."""

MAX_DIGITS: Final = 100
"""Maximum number of digits of a class index; Python itself converts no more than 4,300."""

_INDEX: Final = re.compile(rf"(-?[0-9]{{1,{MAX_DIGITS}}})([.,]0*)?")

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
    columns, decimal = _read_table(path)
    file_column = FILE_COLUMN if FILE_COLUMN in columns else next(iter(columns))
    source = _files_of(path, file_column, columns.pop(file_column))
    if column is None:
        return labelled(str(path), [path.stem], source, torch.zeros(len(source), dtype=torch.int64), preprocess)
    name = _chosen(path, column.name, [*columns], file_column)
    entries = [entry.strip() if isinstance(entry, str) else entry for entry in columns[name]]
    numbers = [_number(entry, decimal) for entry in entries]
    if column.numbers or (column.numbers is None and any(number is not None for number in numbers)):
        values = _checked_numbers(path, name, entries, numbers)
        return measured(str(path), Target.of(name, column.unit), source, values, preprocess)
    if column.unit:
        raise UsageError(f"{path} has classes in {name!r}, which have no unit; leave out the unit {column.unit!r}")
    labels = _class_names(path, name, entries, numbers)
    # Class indices count in their own order: "10" comes after "9".
    classes = sorted({*labels}, key=(lambda label: (int(label), label)) if None not in numbers else None)
    position = {label: index for index, label in enumerate(classes)}
    data = labelled(str(path), classes, source, torch.tensor([position[label] for label in labels]), preprocess)
    return replace(data, names_empty_classes=False)


def _chosen(path: Path, name: str | None, others: Sequence[str], file_column: str) -> str:
    """Return the name of the column to read among those beside the files'; raises :class:`UsageError`."""
    shown = f"the columns {', '.join(others) or 'none'} beside that of the files, {file_column!r}"
    if name is None and len(others) != 1:
        raise UsageError(f"{path} has {shown}; choose one with --target")
    chosen = name or others[0]
    if chosen not in others:
        raise UsageError(f"{path} has no column {chosen!r}, it has {shown}; choose one with --target")
    return chosen


def _files_of(path: Path, column: str, entries: Sequence[Any]) -> FileSource:
    """Return the files of a table; raise :class:`DataError` if there are none, or none of them exists."""
    if not entries:
        raise DataError(f"{path} has no rows; give one for each image")
    source = FileSource(path.parent, np.array([os.fsencode(str(entry)) for entry in entries], dtype=np.bytes_))
    if not any(source.path(index).exists() for index in range(len(source))):
        raise DataError(
            f"{path}: none of the files in the column {column!r} exists, the first is {source.path(0)}; give paths "
            f"with their suffixes, relative to the table's folder, in the column {FILE_COLUMN!r} or in the first one"
        )
    return source


def _number(entry: Any, decimal: str) -> float | None:
    if isinstance(entry, str):
        return parse_number(entry, decimal)
    try:
        return float(entry)
    except (TypeError, ValueError):
        return None


def _checked_numbers(path: Path, column: str, entries: Sequence[Any], numbers: Sequence[float | None]) -> torch.Tensor:
    """Return the numbers of a column, float64."""
    for row, (entry, number) in enumerate(zip(entries, numbers, strict=True), 1):
        if number is None:
            raise DataError(
                f"{path}: row {row} has {column} {entry!r}, expected a number; correct it, or give --task "
                "classification if these are classes"
            )
    return torch.tensor(numbers, dtype=torch.float64)


def _class_names(path: Path, column: str, entries: Sequence[Any], numbers: Sequence[float | None]) -> list[str]:
    """Return the class name of each row; where all are numbers, these are class indices, and 3.0 is "3"."""
    are_indices = None not in numbers
    names: list[str] = []
    spelled: dict[int, str] = {}
    for row, (entry, number) in enumerate(zip(entries, numbers, strict=True), 1):
        if entry is None or entry == "":
            raise DataError(f"{path}: row {row} has no {column}; give its class, or leave the image out")
        name = _index(entry) if are_indices else str(entry)
        if name is None:
            advice = (
                "expected a class name or index; numbers are of --task regression"
                if number is not None and math.isfinite(number) and not number.is_integer()
                else f"expected a class index of at most {MAX_DIGITS} digits, as in other rows; give its class, under "
                "another name if it is called so, or leave the image out"
            )
            raise DataError(f"{path}: row {row} has {column} {shortened(repr(entry))}, {advice}")
        if are_indices and (other := spelled.setdefault(int(name), name)) != name:
            raise DataError(
                f"{path}: row {row} has {column} {name!r}, a row before it {other!r}; write a class one way"
            )
        names.append(name)
    return names


def _index(entry: Any) -> str | None:
    """Return a class index with all its digits, also of 3.0; None if it is another number."""
    if isinstance(entry, str):  # Not by way of a float, which has digits for no number above 2**53.
        found = _INDEX.fullmatch(entry)
        return found and found[1]
    return str(int(entry)) if math.isfinite(entry) and entry == int(entry) else None


def _read_table(path: Path) -> tuple[dict[str, list[Any]], str]:
    """Read the columns of a table by name; return them and the decimal mark of numbers that are text."""
    if path.suffix.lower() == ".parquet":
        try:
            from pyarrow import parquet
            from pyarrow.lib import ArrowException
        except ImportError as error:
            raise UsageError(f"{path} needs pyarrow; pip install 'psc[parquet]'") from error
        try:
            table = parquet.ParquetFile(path).read()
        except (OSError, ArrowException) as error:
            raise DataError(f"cannot read the table {path}: {error}") from error
        _check_names(path, table.column_names)
        columns: dict[str, list[Any]] = table.to_pydict()
        return columns, "."
    try:
        with open_csv(path) as opened:
            rows = [row for _, row in opened.lines]
    except OSError as error:
        raise DataError(f"cannot read the table {path}: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty; give a table with a header, as file,label")
    header = rows[0]
    _check_names(path, header)
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} values, the header {len(header)}; correct the row")
    return {name: [row[at] for row in rows[1:]] for at, name in enumerate(header)}, opened.decimal


def _check_names(path: Path, columns: Sequence[str]) -> None:
    """Raise :class:`DataError` if a table has no columns, or two of the same name."""
    if not columns:
        raise DataError(f"{path} has no columns; give a table with a header, as file,label")
    name, count = Counter(columns).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path} has the column {name!r} twice; name each column once")
