"""Images that each have a measured number, from a table beside the image files."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import FileSource, ImageSource
from psc_core.errors import DataError, UsageError
from psc_core.images.preprocess import Preprocess
from psc_core.target import Target

FILE_COLUMN: Final = "file"
"""The column of a table that holds the paths of the images, relative to the table's folder."""

TABLE_SUFFIXES: Final = (".csv", ".parquet")


def known_values(values: Tensor | None) -> Tensor:
    """Return the target values of images; raise :class:`DataError` if the images have classes instead."""
    if values is None:
        raise DataError("expected images with numbers, got images with classes; give images for the model's task")
    return values


def measured(
    name: str, target: Target, source: ImageSource, values: Float[Tensor, " n"], preprocess: Preprocess
) -> ImageDataset:
    """Create a data set of the n images in ``source`` with target ``values``, all in one bin.

    Raises:
        DataError: If there are no images, not as many values as images, or a value is not finite.
    """
    count = len(values)
    if len(source) != count or count == 0:
        raise DataError(
            f"{name}: expected one {target.name} per image and at least one image, got {count} and {len(source)} images"
        )
    odd = int((~values.isfinite()).sum())
    if odd:
        raise DataError(f"{name}: expected finite numbers of {target.name}, got {odd} that are not; leave them out")
    labels, offsets = torch.zeros(count, dtype=torch.int64), torch.arange(count + 1)
    return ImageDataset(
        name, (target.name,), source, torch.arange(count), labels, offsets, preprocess,
        target=target, values=values.double(),
    )  # fmt: skip


def open_table(path: Path, preprocess: Preprocess, *, target: str | None = None, unit: str = "") -> ImageDataset:
    """Open the images that a table lists, with the numbers in one of its columns.

    Args:
        path: A ``.csv`` with a header or a ``.parquet`` with the column :data:`FILE_COLUMN` and columns of numbers.
        preprocess: How the images are read.
        target: The name of the column; None if there is only one.
        unit: The unit of the numbers.

    Raises:
        DataError: If the table cannot be read, lacks a column, or has an entry that is not a number.
        UsageError: If ``target`` is not one of its columns, or is None and there are several.
    """
    columns = _read_table(path)
    if FILE_COLUMN not in columns:
        raise DataError(
            f"{path} has no column {FILE_COLUMN!r}, it has {', '.join(columns)}; give this name to the column of the "
            "images' paths"
        )
    others = [name for name in columns if name != FILE_COLUMN]
    if target is None and len(others) != 1:
        raise UsageError(f"{path} has the columns {', '.join(others) or 'none'} and files; choose one with --target")
    column = target or others[0]
    if column not in others:
        raise UsageError(f"{path} has no column {column!r}, it has {', '.join(others)}; choose one with --target")
    values = torch.empty(len(columns[column]), dtype=torch.float64)
    for row, value in enumerate(columns[column]):
        try:
            values[row] = float(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}: row {row + 1} has {column} {value!r}, expected a number") from error
    files = np.array([os.fsencode(str(name)) for name in columns[FILE_COLUMN]], dtype=np.bytes_)
    return measured(str(path), Target(name=column, unit=unit), FileSource(path.parent, files), values, preprocess)


def _read_table(path: Path) -> dict[str, list[Any]]:
    """Read the columns of a table by name."""
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
        return columns
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]  # blank lines are not rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read the table {path}: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty; give a table with a header, as file,age")
    header = rows[0]
    _check_names(path, header)
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} values, the header {len(header)}; correct the row")
    return {name: [row[at] for row in rows[1:]] for at, name in enumerate(header)}


def _check_names(path: Path, columns: Sequence[str]) -> None:
    """Raise :class:`DataError` if two columns of a table have the same name."""
    name, count = Counter(columns).most_common(1)[0] if columns else ("", 0)
    if count > 1:
        raise DataError(f"{path} has the column {name!r} twice; name each column once")
