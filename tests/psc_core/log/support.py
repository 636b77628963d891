"""A log with a few rows, written without a service."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from psc_core.answers import CLASSIFICATION_SCORES, Target
from psc_core.answers import REGRESSION_SCORES as VALUE_SCORES
from psc_core.log.store import Log, LoggedModel, image_path, model_path, open_log, row_schema, rows_path
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression

CLASSES = ("cat", "dog")
TIME = datetime(2026, 3, 1, 12, tzinfo=UTC)
POLICY = json.dumps({"alpha": 0.05, "ambiguity_threshold": 0.5, "coverage": 0.9})


def content(index: int) -> bytes:
    """The bytes of an image."""
    return f"image {index}".encode()


def digest(index: int) -> str:
    return hashlib.sha256(content(index)).hexdigest()


def row(index: int, **changes: Any) -> dict[str, Any]:
    """The row of image ``index``, alone in the request ``rINDEX``."""
    return {
        "time": TIME, "request_id": f"r{index}", "image_index": 0, "bundle_version": "v1", "policy": POLICY,
        **dict.fromkeys(CLASSIFICATION_SCORES, 0.5), "probabilities": [0.25, 0.75], "checks": [], "label": "dog",
        "decision": "accept",
        "sampling_probability": 1.0, "sampled": False, "sample_probability": 0.01, "image_sha256": digest(index),
        "image_path": image_path(digest(index), "png"), **changes,
    }  # fmt: skip


def put_rows(log: Log, rows: list[dict[str, Any]], model: str = "m", day: str = "2026-03-01") -> None:
    """Write one file of rows, and their images."""
    for each in rows:
        if each["image_path"]:
            log.put(each["image_path"], content(int(each["request_id"][1:])))
    scores = VALUE_SCORES if "mean" in rows[0] else CLASSIFICATION_SCORES
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=row_schema(scores)), sink)
    log.put(rows_path(model, day), sink.getvalue())


def make_log(folder: Path, count: int = 6) -> Log:
    """A log of a classifier with ``count`` rows, whose images are stored."""
    log = open_log(folder)
    if count:
        put_rows(log, [row(index) for index in range(count)])
    log.put(model_path("v1"), LoggedModel("v1", Classification(), CLASSES).to_json())
    return log


def add_values(log: Log, model: str = "v") -> None:
    """Add a row of a regression, request ``r90``."""
    scores = dict.fromkeys(VALUE_SCORES, 0.5)
    value = {**row(90, bundle_version="w1", probabilities=None, label=None, policy='{"alpha": 0.05}'), **scores}
    put_rows(log, [{name: cell for name, cell in value.items() if name in row_schema(VALUE_SCORES).names}], model)
    log.put(model_path("w1"), LoggedModel("w1", Regression(target=Target(name="angle")), ("a", "b")).to_json())
