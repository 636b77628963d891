"""List the images to score, in the same order in every process and every run.

An input is a folder (with every image file below it), a Parquet file with a column of paths or encoded images, or a
text file with one path a line.  Images are streamed: memory holds the names of one folder or one part at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from psc_core.errors import DataError, UsageError, needs
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below

COLUMN: Final = "image"
"""The default column of a Parquet file."""


@dataclass(frozen=True)
class NamedImage:
    """One image to score."""

    name: str  # the path, or the row in a Parquet file
    image: str | bytes  # a path, or an encoded image


def in_parts(images: Iterator[NamedImage], size: int) -> Iterator[list[NamedImage]]:
    """Yield consecutive lists of ``size`` images; the last may be shorter."""
    while part := list(islice(images, size)):
        yield part


def named_images(source: Path, column: str | None = None) -> Iterator[NamedImage]:
    """Return the images in a folder, a ``.parquet`` file (its ``column``) or a text file of paths.

    Raises:
        UsageError: If there is no such file, folder or column, pyarrow is not installed, or a column is given for what
            has none.
        DataError: If a Parquet file is damaged, when the images are reached.
    """
    if not source.is_dir() and not source.is_file():
        raise UsageError(f"{source} does not exist; give a folder, a .parquet file or a text file of paths")
    if source.is_file() and source.suffix.lower() == ".parquet":
        return _parquet(source, column or COLUMN)
    if column:
        raise UsageError(f"{source} has no columns, a .parquet file has; leave out the column {column!r}")
    return _folder(source) if source.is_dir() else _paths(source)


def _folder(root: Path) -> Iterator[NamedImage]:
    for path in files_below(root):
        if path.lower().endswith(SUFFIXES):
            yield NamedImage(_printable(os.path.relpath(path, root)), path)


def _paths(file: Path) -> Iterator[NamedImage]:
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if path := line.rstrip("\r\n"):
                yield NamedImage(_printable(path), path)


def _parquet(file: Path, column: str) -> Iterator[NamedImage]:
    try:
        for row, value in enumerate(_cells(file, column)):
            yield NamedImage(str(row), _encoded(value, file))
    except (needs("Parquet", "parquet", "pyarrow").ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({' '.join(str(error).split())}); write it again") from error


def _cells(file: Path, column: str) -> Iterator[Any]:
    table = pyarrow_parquet().ParquetFile(file)
    if column not in table.schema_arrow.names:
        raise UsageError(f"{file} has no column {column!r}; it has {', '.join(table.schema_arrow.names)}")
    for batch in table.iter_batches(batch_size=256, columns=[column]):
        yield from batch.column(0).to_pylist()


def _printable(path: str) -> str:
    """Return a path as valid Unicode, with � for undecodable bytes of a file name."""
    return os.fsencode(path).decode("utf-8", "replace")


def _encoded(value: Any, file: Path) -> str | bytes:
    """Return the image in a cell: bytes, a path, or Hugging Face's ``{"bytes": …, "path": …}``."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if value is None:
        return b""  # an empty cell fails to decode and is reported so
    if isinstance(value, str | bytes):
        return value
    raise UsageError(f"{file}: expected a column of bytes, paths or structs of both, got {type(value).__name__}")


def pyarrow_parquet() -> Any:
    """Return the module ``pyarrow.parquet``; raise :class:`UsageError` if it is not installed."""
    return needs("Parquet", "parquet", "pyarrow.parquet")
