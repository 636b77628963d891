"""Write the outputs of scored images as columns, one file a part, in Parquet or JSON lines.

The columns are ``item`` (the image's name), those of the model's task (:meth:`psc_core.tasks.task.Task.columns`), and
``error``, the reason why an image has no answer.  Either ``error`` or the columns of the task are null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from psc_core.errors import UsageError
from psc_core.scoring.inputs import pyarrow_parquet
from psc_core.tasks.prediction import BasePrediction
from psc_core.tasks.task import Task

Columns = dict[str, list[Any]]
"""The cells of all images, by column."""


def columns_of(prediction: BasePrediction, task: Task) -> Columns:
    """Return the columns of the model's task, null where its answers have no such field."""
    same = {name: [value] * len(prediction) for name, value in task.model_dump().items()}
    found = {**same, **prediction.columns()}
    return {name: found.get(name, [None] * len(prediction)) for name in task.columns()}


def merge(names: Sequence[str], errors: Sequence[str | None], scored: Columns) -> Columns:
    """Return the columns of a part; ``scored`` has the cells of the images without errors, in order."""
    cells = {name: iter(column) for name, column in scored.items()}
    merged = {name: [None if error else next(column) for error in errors] for name, column in cells.items()}
    return {"item": list(names), **merged, "error": list(errors)}


def write(columns: Columns, types: Mapping[str, Any], file: Path) -> None:
    """Write columns under a temporary name, then rename the file, so that a part exists as a whole or not at all.

    Args:
        columns: The columns of a part, from :func:`merge`.
        types: The types of the task's columns, from :meth:`psc_core.tasks.task.Task.columns`.
        file: The file to write, ``.parquet`` or ``.jsonl``.
    """
    partial = file.with_suffix(".partial")
    if file.suffix == ".parquet":
        pyarrow_parquet().write_table(_arrow(columns, types), partial)
    else:
        rows = zip(*columns.values(), strict=True)
        partial.write_text(
            "".join(json.dumps(dict(zip(columns, row, strict=True)), allow_nan=False) + "\n" for row in rows)
        )
    partial.replace(file)


def errors_in(file: Path) -> list[tuple[str, str | None]]:
    """Return the columns ``item`` and ``error`` of a written part.

    Raises:
        UsageError: If the file is damaged.
    """
    try:
        if file.suffix == ".parquet":
            table = pyarrow_parquet().read_table(file, columns=["item", "error"])
            return list(zip(table["item"].to_pylist(), table["error"].to_pylist(), strict=True))
        rows = map(json.loads, file.read_text().splitlines())
        return [(row["item"], row["error"]) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{file} cannot be read ({error}); remove it and run again") from error


def _arrow(columns: Columns, types: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    arrow = {name: _arrow_type(types.get(name, str)) for name in columns}
    return pa.table(
        {
            name: pa.array([list(each.items()) if each else each for each in column], arrow[name])
            if pa.types.is_map(arrow[name])
            else pa.array(column, arrow[name])
            for name, column in columns.items()
        }
    )


def _arrow_type(annotation: Any) -> Any:
    """Return the Arrow type for a field's annotation; every column may hold nulls."""
    import pyarrow as pa

    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    plain = {float: pa.float32(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct([(name, _arrow_type(field.annotation)) for name, field in annotation.model_fields.items()])
    inner = get_args(annotation)
    if get_origin(annotation) is list:
        return pa.list_(_arrow_type(inner[0]))
    if get_origin(annotation) is dict:
        return pa.map_(*map(_arrow_type, inner))
    return pa.string()  # literals
