"""The verdicts of people on logged images; the last one on an image wins.

A label names its image by request and position, by the digest of its bytes, or by both, and the model that it is about.
It holds for every row of that model with these bytes, so that the same image in another request has the same verdict;
another model may have other classes.  Labels from before they named a model hold for their row alone, or, where they
name a digest alone, for every row of that image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psc_core.errors import DataError
from psc_core.log.schema import IMAGE_INDEX, LABELS, REQUEST_ID, SHA256, arrow, label_schema, labels_path
from psc_core.log.store import Log

LABEL: Final = "label"
NONE_OF_THE_CLASSES: Final = "none_of_the_classes"
CANNOT_TELL: Final = "cannot_tell"

VERDICTS: Final = (LABEL, NONE_OF_THE_CLASSES, CANNOT_TELL)
"""It has this label; it shows none of the classes; nobody can say."""

Key = tuple[str | None, str | int | None]
"""A request and a position, or a model and the digest of an image."""


@dataclass(frozen=True)
class Label:
    """One verdict; ``request_id`` and ``image_index``, or ``image_sha256``, are there."""

    request_id: str | None
    image_index: int | None
    image_sha256: str | None
    verdict: str  # one of :data:`VERDICTS`
    label: str | None  # a class, or a number as text; only with the verdict ``label``
    source: str
    time: datetime  # with a time zone
    model: str | None = None  # the name by which it was served


def label_keys(
    model: str | None, request_id: str | None, image_index: int | None, image_sha256: str | None
) -> list[Key]:
    """Return what a label is found by: its row, and its image where it names a model or no row."""
    of_row: list[Key] = [(request_id, image_index)] if request_id is not None else []
    of_image: list[Key] = [(model, image_sha256)] if image_sha256 is not None else []
    return of_row + of_image if model is not None else of_row or of_image


def row_keys(model: str, request_id: str, image_index: int, image_sha256: str | None) -> list[Key]:
    """Return all that a label on the image of a row may be found by."""
    of_image: list[Key] = [(model, image_sha256), (None, image_sha256)] if image_sha256 is not None else []
    return [(request_id, image_index), *of_image]


class Labels:
    """The last verdict on each image.

    Args:
        labels: In any order; of two with the same time the later one counts.
    """

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        ordered = sorted(labels, key=lambda each: each.time)
        self._last = {
            key: label
            for label in ordered
            for key in label_keys(label.model, label.request_id, label.image_index, label.image_sha256)
        }

    def of(self, model: str, request_id: str, image_index: int, image_sha256: str | None) -> Label | None:
        """Return the last verdict on the image of a row; None where nobody gave one."""
        keys = row_keys(model, request_id, image_index, image_sha256)
        return max((self._last[key] for key in keys if key in self._last), key=lambda each: each.time, default=None)


def read_labels(log: Log) -> Labels:
    """Return the last verdict on each image of a log; memory holds all labels.

    Raises:
        DataError: A file of labels is damaged.
        OSError: The log cannot be read.
    """
    return Labels(label for name, _ in label_files(log) for label in read_file(log, name))


def label_files(log: Log) -> list[tuple[str, datetime]]:
    """Return the files of labels, each with when it was written; raises ``OSError``."""
    return list(log.names(LABELS, suffix=".parquet"))


def read_file(log: Log, name: str) -> list[Label]:
    """Return the labels of one file; raises as :func:`read_labels`."""
    pa = arrow()
    try:
        table = pa.parquet.read_table(pa.BufferReader(log.get(name)), schema=label_schema())
        return [Label(**row) for row in table.to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"{log.where}/{name} is no file of labels ({error}); remove it") from error


def write_labels(log: Log, labels: Iterable[Label], name: str | None = None) -> None:
    """Write labels to a new file, or in place of an old one; raises ``OSError``."""
    pa = arrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist([vars(label) for label in labels], schema=label_schema()), sink)
    log.put(name or labels_path(), sink.getvalue())


def joined(rows: Iterable[Any], labels: Labels, model: str) -> Iterator[Any]:
    """Yield rows with the columns ``verdict``, ``true_label`` and ``verdict_time``, null where nobody gave a verdict.

    Args:
        rows: From :func:`.rows.read_rows`, with at least the columns ``request_id``, ``image_index``, ``image_sha256``.
        labels: From :func:`read_labels`.
        model: Whose rows they are.
    """
    pa = arrow()
    for batch in rows:
        keys = zip(*(batch[name].to_pylist() for name in (REQUEST_ID, IMAGE_INDEX, SHA256)), strict=True)
        found = [labels.of(model, *key) for key in keys]
        for name, cells, kind in (
            ("verdict", [each and each.verdict for each in found], pa.string()),
            ("true_label", [each and each.label for each in found], pa.string()),
            ("verdict_time", [each and each.time for each in found], pa.timestamp("us", tz="UTC")),
        ):
            batch = batch.append_column(name, pa.array(cells, kind))
        yield batch
