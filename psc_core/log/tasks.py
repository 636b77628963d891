"""Write the images to review as tasks for people: Label Studio's JSON, or a CSV with an empty column ``label``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from psc_core.log.review import ReviewImage
from psc_core.log.schema import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256
from psc_core.log.store import Log


def path_prefix(log: Log) -> str:
    """Return the prefix with which an image's path is that of its file, from where the log was named."""
    return f"{log.where.rstrip('/')}/"


def label_studio_prefix(log: Log) -> str:
    """Return the prefix with which Label Studio shows the images: its URL of local files, or the bucket."""
    return "/data/local-files/?d=" if log.is_folder else path_prefix(log)


def to_label_studio(candidates: Sequence[ReviewImage], prefix: str) -> str:
    """Return Label Studio tasks, with the model's label as prediction; they sort by the prediction's score."""
    tasks = []
    for position, each in enumerate(candidates):
        label = each.row["label"]
        choice = {"from_name": "label", "to_name": "image", "type": "choices", "value": {"choices": [label]}}
        prediction: dict[str, Any] = {
            "model_version": each.row["bundle_version"],
            "score": position / len(candidates),
            "result": [] if label is None else [choice],
        }
        tasks.append({"data": _data(each, prefix), "predictions": [prediction]})
    return json.dumps(tasks, ensure_ascii=False, indent=1)


def to_csv(candidates: Sequence[ReviewImage], prefix: str) -> str:
    """Return a CSV line for each image, with the model's label as ``predicted`` and an empty ``label`` to fill in."""
    file = io.StringIO()
    rows = [{**_data(each, prefix), "label": ""} for each in candidates]
    names = list(rows[0]) if rows else [REQUEST_ID, IMAGE_INDEX, SHA256, "label"]
    lines = csv.DictWriter(file, names)
    lines.writeheader()
    lines.writerows(rows)
    return file.getvalue()


def _data(each: ReviewImage, prefix: str) -> dict[str, Any]:
    row = each.row
    return {
        "image": prefix + row[IMAGE_PATH],
        REQUEST_ID: row[REQUEST_ID],
        IMAGE_INDEX: row[IMAGE_INDEX],
        SHA256: row[SHA256],
        "model": each.model,
        "predicted": row["label"],
        "decision": row["decision"],
        "reason": each.reason,
        "audit": each.is_audit,
    }
