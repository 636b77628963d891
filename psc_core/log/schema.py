"""The columns of a log's rows and labels, as Arrow schemas, and the paths of its files.

The scores of a task, float32, follow the columns that all tasks share; :func:`scores_in` tells them apart.  pyarrow is
imported only when a schema is made (extra ``log``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from psc_core.errors import needs

MODELS: Final = "models"
IMAGES: Final = "images"
LABELS: Final = "labels"
"""The folders of a log."""

REQUEST_ID: Final = "request_id"
IMAGE_INDEX: Final = "image_index"
SHA256: Final = "image_sha256"
IMAGE_PATH: Final = "image_path"
"""The columns of rows and labels that identify an image; only rows have its path."""


def arrow() -> Any:
    """Return the module ``pyarrow``; raise :class:`.UsageError` if it is not installed."""
    return needs("the prediction log", "log", "pyarrow.dataset", "pyarrow.parquet", "pyarrow.fs", "pyarrow")


def row_schema(scores: Sequence[str]) -> Any:
    """Return the Arrow schema of rows.

    Args:
        scores: The names of the scores of the model's task, in order.
    """
    pa = arrow()
    return pa.schema(
        [
            ("time", pa.timestamp("us", tz="UTC")),  # of the answer
            (REQUEST_ID, pa.string()),  # trace and span of the answer's header ``traceresponse``: "TRACE-SPAN"
            (IMAGE_INDEX, pa.int32()),  # position in the request, from 0
            ("bundle_version", pa.string()),
            ("policy", pa.string()),  # the thresholds in use, as JSON
            *((score, pa.float32()) for score in scores),
            ("probabilities", pa.list_(pa.float32())),  # in class order; null for a task without probabilities
            ("gates", pa.map_(pa.string(), pa.float32())),  # p-value of each gate; empty for a model without gates
            ("label", pa.string()),  # null for a task whose answers have no label
            ("decision", pa.string()),
            ("sampling_probability", pa.float64()),  # of an image with this decision to enter the log
            ("audit", pa.bool_()),  # whether the row belongs to the audit slice
            ("audit_probability", pa.float64()),  # of any image to enter the audit slice
            (SHA256, pa.string()),  # of the bytes as received, hexadecimal; null once the image is erased
            (IMAGE_PATH, pa.string()),  # of the logged image, relative to the log; null if it was not stored
        ]
    )


def label_schema() -> Any:
    """Return the Arrow schema of labels."""
    pa = arrow()
    return pa.schema(
        [
            (REQUEST_ID, pa.string()),  # null if the label names only a digest
            (IMAGE_INDEX, pa.int32()),
            (SHA256, pa.string()),  # null if the label names only a request
            ("verdict", pa.string()),  # one of :data:`.labels.VERDICTS`
            ("label", pa.string()),  # a class, or the number of a regression as text; null with other verdicts
            ("source", pa.string()),  # the person or tool that it comes from
            ("time", pa.timestamp("us", tz="UTC")),
            ("model", pa.string()),  # of the row; null in older labels
        ]
    )


def scores_in(schema: Any) -> list[str]:
    """Return the names of the scores among the columns of rows."""
    common = set(row_schema(()).names)
    return [field.name for field in schema if field.name not in common and field.type == arrow().float32()]


def rows_path(model: str, day: str) -> str:
    """Return the path of a new file of rows for ``day``, ``YYYY-MM-DD`` in UTC."""
    return f"model={model}/day={day}/part-{uuid4().hex}.parquet"


def labels_path() -> str:
    return f"{LABELS}/part-{uuid4().hex}.parquet"


def image_path(sha256: str, extension: str) -> str:
    """Return the path of a logged image; ``extension`` has no dot."""
    return f"{IMAGES}/{sha256[:2]}/{sha256}.{extension}"


def model_path(version: str) -> str:
    """Return the path of the record that a log keeps of a bundle."""
    return f"{MODELS}/{version}.json"
