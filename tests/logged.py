"""Prediction logs for tests, written without a service."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from psc_core.data.dataset import ImageDataset
from psc_core.log.labels import Label, write_labels
from psc_core.log.store import Log, image_path, open_log, row_schema, rows_path
from tests.encoded import encode as png

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Logged:
    """One image of a log."""

    content: bytes  # a PNG file
    kind: str | None = None
    label: str | None = None
    sampled: bool = True
    sample_probability: float = 0.1
    sampling_probability: float = 1.0
    answered: str | None = None  # the label of the answer
    decision: str = "accept"
    stored: bool = True
    day: str = "2026-11-20"
    label_time: datetime = NOW
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Digest of the bytes."""
        return hashlib.sha256(self.content).hexdigest()


def dimmed(data: ImageDataset, index: int) -> bytes:
    """An image of a data set with less contrast, as a file: another camera."""
    return png((0.6 * data.image(index)[0] + 40).astype(np.uint8))


def plain(data: ImageDataset, index: int) -> bytes:
    """An image of a data set as a file."""
    return png(data.image(index)[0])


def labelled(
    data: ImageDataset, count: int, picture: Callable[[ImageDataset, int], bytes] = dimmed, sampled: int | None = None
) -> list[Logged]:
    """The first images of a data set with their labels or numbers; the random sample has all of them, or the first."""
    said = data.first_labels() if data.values is None else data.values
    return [
        Logged(picture(data, i), "label", str(each), sampled=sampled is None or i < sampled)
        for i, each in enumerate(said[:count].tolist())
    ]


def write_log(folder: Path, images: Sequence[Logged], model: str = "digits", version: str = "0" * 12) -> Log:
    """Write a log with a row for each image, and the labels."""
    log = open_log(folder)
    rows: dict[str, list[dict[str, Any]]] = {}
    labels = []
    for number, image in enumerate(images):
        path = image_path(image.sha256, "png")
        if image.stored:
            log.put(path, image.content)
        row = {
            "time": datetime.fromisoformat(f"{image.day}T12:00:00+00:00"),
            "request_id": f"{number:032x}-{number:016x}",
            "image_index": 0,
            "bundle_version": version,
            "policy": "{}",
            "label": image.answered,
            "decision": image.decision,
            "sampling_probability": image.sampling_probability,
            "sampled": image.sampled,
            "sample_probability": image.sample_probability,
            "image_sha256": image.sha256,
            "image_path": path if image.stored else None,
            **image.scores,
        }
        rows.setdefault(image.day, []).append(row)
        if image.kind is not None:
            labels.append(
                Label(row["request_id"], 0, image.sha256, image.kind, image.label, "test", image.label_time, model)
            )
    for day, some in rows.items():
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(some, schema=row_schema([*images[0].scores])), sink)
        log.put(rows_path(model, day), sink.getvalue())
    write_labels(log, labels)
    return log
