"""The columns of a log's rows and labels, as Arrow schemas, and the paths of its files.

The scores of a task, float32, stand beside the columns of every task; :func:`scores_in` tells them apart.  pyarrow is
imported where a schema is made (extra ``log``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from psc_core.errors import needs

MODELS: Final = "models"
IMAGES: Final = "images"
LABELS: Final = "labels"
"""Folders of a log."""

REQUEST_ID: Final = "request_id"
IMAGE_INDEX: Final = "image_index"
SHA256: Final = "image_sha256"
IMAGE_PATH: Final = "image_path"
"""Columns by which an image is found, of rows and of labels; only rows have its path."""


def arrow() -> Any:
    """Return the module ``pyarrow``; raises :class:`.UsageError` where it is not installed."""
    return needs("the prediction log", "log", "pyarrow.dataset", "pyarrow.parquet", "pyarrow.fs", "pyarrow")


def row_schema(scores: Sequence[str]) -> Any:
    """Return the Arrow schema of rows.

    Args:
        scores: Names of the scores of the model's task, in their order.
    """
    pa = arrow()
    return pa.schema(
        [
            ("time", pa.timestamp("us", tz="UTC")),  # when it was answered
            (REQUEST_ID, pa.string()),  # trace and span of the answer's header ``traceresponse``: "TRACE-SPAN"
            (IMAGE_INDEX, pa.int32()),  # its position in the request, from 0
            ("bundle_version", pa.string()),
            ("policy", pa.string()),  # JSON of the thresholds that were used
            *((score, pa.float32()) for score in scores),
            ("probabilities", pa.list_(pa.float32())),  # in class order; null for a task without
            ("gates", pa.map_(pa.string(), pa.float32())),  # p-value of each gate; empty for a model without gates
            ("label", pa.string()),  # null for a task that has none in its answer
            ("decision", pa.string()),
            ("sampling_probability", pa.float64()),  # with which an image of this decision came into the log
            ("audit", pa.bool_()),  # whether it is of the random slice
            ("audit_probability", pa.float64()),  # with which any image comes into the slice
            (SHA256, pa.string()),  # of its bytes as received, hexadecimal; null once it is erased
            (IMAGE_PATH, pa.string()),  # of the stored image, relative to the log; null where there is none
        ]
    )


def label_schema() -> Any:
    """Return the Arrow schema of labels."""
    pa = arrow()
    return pa.schema(
        [
            (REQUEST_ID, pa.string()),  # null where an image is known by its digest alone
            (IMAGE_INDEX, pa.int32()),
            (SHA256, pa.string()),  # null where it is known by its request alone
            ("verdict", pa.string()),  # one of :data:`.labels.VERDICTS`
            ("label", pa.string()),  # a class, or the number of a regression as text; null for other verdicts
            ("source", pa.string()),  # who or what gave it
            ("time", pa.timestamp("us", tz="UTC")),
            ("model", pa.string()),  # of the row; null in labels from before there was this column
        ]
    )


def scores_in(schema: Any) -> list[str]:
    """Return the names of the scores among the columns of rows."""
    common = set(row_schema(()).names)
    return [field.name for field in schema if field.name not in common and field.type == arrow().float32()]


def rows_path(model: str, day: str) -> str:
    """Return the path of a new file of rows; ``day`` is ``YYYY-MM-DD``, in UTC."""
    return f"model={model}/day={day}/part-{uuid4().hex}.parquet"


def labels_path() -> str:
    """Return the path of a new file of labels."""
    return f"{LABELS}/part-{uuid4().hex}.parquet"


def image_path(sha256: str, extension: str) -> str:
    """Return the path of a stored image; the extension is without a dot."""
    return f"{IMAGES}/{sha256[:2]}/{sha256}.{extension}"


def model_path(version: str) -> str:
    """Return the path of what a log keeps of a bundle."""
    return f"{MODELS}/{version}.json"
