"""Outputs of scored images as tables: one file a part, in Parquet or JSON lines.

Columns: ``item`` (the image's name), every field of :class:`psc_core.prediction.ImagePrediction` that a prediction has,
and ``error``: why an image could not be read, null for the others, whose fields are null instead.  Of a regression the
fields are those of :class:`psc_core.value_prediction.ValuePrediction`, and ``target``, its name and unit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from psc_core.errors import UsageError
from psc_core.model.prediction import Prediction
from psc_core.model.value_predictions import ValuePredictions
from psc_core.prediction import Document, ImagePrediction
from psc_core.scoring.inputs import pyarrow_parquet
from psc_core.target import Target
from psc_core.value_prediction import ValuePrediction

FORMATS: Final = ("jsonl", "parquet")

TARGET: Final = "target"


def fields_of(document: type[Document]) -> tuple[str, ...]:
    """Fields of a prediction that are columns: all but those that a request asks for."""
    return tuple(name for name in document.model_fields if name not in ("top", "explanation"))


FIELDS: Final = fields_of(ImagePrediction)
"""Columns of a classifier's predictions."""

VALUE_FIELDS: Final = (TARGET, *fields_of(ValuePrediction))
"""Columns of a regression's predictions."""

Column = list[Any]
Table = dict[str, Column]


def as_table(prediction: Prediction | ValuePredictions) -> Table:
    """The columns of n predictions."""
    columns: dict[str, Any] = {"gates": _gates_of(prediction)}
    if isinstance(prediction, ValuePredictions):
        names = VALUE_FIELDS
        columns[TARGET] = [prediction.target.model_dump()] * len(prediction)
    else:
        names = FIELDS
        columns["label"] = prediction.labels
    columns |= {name: getattr(prediction, name) for name in names if name not in columns}
    return {name: each.tolist() if isinstance(each, torch.Tensor) else list(each) for name, each in columns.items()}


def _gates_of(prediction: Prediction | ValuePredictions) -> Column:
    """p-values by gate of each image; null for a model without gates."""
    rows = zip(*(p_values.tolist() for p_values in prediction.gates.values()), strict=True)
    return [dict(zip(prediction.gates, row, strict=True)) for row in rows] or [None] * len(prediction)


def merge(names: Sequence[str], errors: Sequence[str | None], scored: Table) -> Table:
    """The table of a part: ``scored`` has the rows of the images without an error, in order."""
    columns = {name: iter(column) for name, column in scored.items()}
    rows = {name: [None if error else next(column) for error in errors] for name, column in columns.items()}
    return {"item": list(names), **rows, "error": list(errors)}


def write(table: Table, file: Path) -> None:
    """Write a table under a temporary name, then rename it: a part exists as a whole or not at all."""
    partial = file.with_suffix(".partial")
    if file.suffix == ".parquet":
        pyarrow_parquet().write_table(_arrow(table), partial)
    else:
        rows = zip(*table.values(), strict=True)
        partial.write_text("".join(json.dumps(dict(zip(table, row, strict=True))) + "\n" for row in rows))
    partial.replace(file)


def items_of(file: Path) -> list[str]:
    """The ``item`` column of a written part.

    Raises:
        UsageError: The file is damaged.
    """
    try:
        if file.suffix == ".parquet":
            names: list[str] = pyarrow_parquet().read_table(file, columns=["item"])["item"].to_pylist()
            return names
        return [json.loads(line)["item"] for line in file.read_text().splitlines()]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{file} cannot be read ({error}); remove it and run again") from error


def _arrow(table: Table) -> Any:
    import pyarrow as pa

    kinds = {"probabilities": pa.list_(pa.float32()), "prediction_set": pa.list_(pa.string()), "is_ood": pa.bool_()}
    kinds |= dict.fromkeys(("item", "label", "decision", "error"), pa.string()) | {"class_index": pa.int64()}
    kinds["gates"] = pa.map_(pa.string(), pa.float32())
    kinds[TARGET] = pa.struct([(name, pa.string()) for name in Target.model_fields])
    table = table | {"gates": [each and list(each.items()) for each in table["gates"]]}
    return pa.table({name: pa.array(column, kinds.get(name, pa.float32())) for name, column in table.items()})
