"""People's verdicts on logged images; the last verdict on an image counts.

A label names its model, and its image by request and position, by the digest of its bytes, or by both.  It applies to
every row of that model with these bytes, so the same image in another request has the same verdict; another model may
have other classes.  Older labels without a model apply only to their row, or, if they name only a digest, to every row
of that image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, get_args

from psc_core.errors import DataError
from psc_core.log.schema import IMAGE_INDEX, LABELS, REQUEST_ID, SHA256, arrow, label_schema, labels_path
from psc_core.log.store import Log

Verdict = Literal["label", "none_of_the_classes", "cannot_tell"]

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
"""The possible verdicts: the image has this label; it shows none of the classes; nobody can tell."""

LABEL: Final = "label"
NONE_OF_THE_CLASSES: Final = "none_of_the_classes"
CANNOT_TELL: Final = "cannot_tell"

Key = tuple[str | None, str | int | None]
"""A request and a position, or a model and the digest of an image."""


@dataclass(frozen=True)
class Label:
    """One verdict, on an image named by ``request_id`` and ``image_index``, by ``image_sha256``, or by both."""

    request_id: str | None
    image_index: int | None
    image_sha256: str | None
    verdict: str  # one of :data:`VERDICTS`
    label: str | None  # a class, or a number as text; only with the verdict ``label``
    source: str
    time: datetime  # with a time zone
    model: str | None = None  # the name under which it was served


def label_keys(
    model: str | None, request_id: str | None, image_index: int | None, image_sha256: str | None
) -> list[Key]:
    """Return the keys under which a label is found: its row, and its image if it names a model or no row."""
    of_row: list[Key] = [(request_id, image_index)] if request_id is not None else []
    of_image: list[Key] = [(model, image_sha256)] if image_sha256 is not None else []
    return of_row + of_image if model is not None else of_row or of_image


def row_keys(model: str, request_id: str, image_index: int, image_sha256: str | None) -> list[Key]:
    """Return all keys under which a label on the image of a row may be found."""
    of_image: list[Key] = [(model, image_sha256), (None, image_sha256)] if image_sha256 is not None else []
    return [(request_id, image_index), *of_image]


class Labels:
    """The last verdict on each image.

    Args:
        labels: Labels in any order; of two with the same time the later one counts.
    """

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        ordered = sorted(labels, key=lambda each: each.time)
        self._last = {
            key: label
            for label in ordered
            for key in label_keys(label.model, label.request_id, label.image_index, label.image_sha256)
        }

    def of(self, model: str, request_id: str, image_index: int, image_sha256: str | None) -> Label | None:
        """Return the last verdict on the image of a row, or None if there is no verdict."""
        keys = row_keys(model, request_id, image_index, image_sha256)
        return max((self._last[key] for key in keys if key in self._last), key=lambda each: each.time, default=None)


def read_labels(log: Log) -> Labels:
    """Return the last verdict on each image of a log; all labels are held in memory.

    Raises:
        DataError: If a file of labels is damaged.
        OSError: If the log cannot be read.
    """
    return Labels(label for name, _ in label_files(log) for label in read_file(log, name))


def label_files(log: Log) -> list[tuple[str, datetime]]:
    """Return the names of the files of labels with their times of writing; may raise ``OSError``."""
    return list(log.names(LABELS, suffix=".parquet"))


def read_file(log: Log, name: str) -> list[Label]:
    """Return the labels in one file; raises the errors of :func:`read_labels`."""
    pa = arrow()
    try:
        table = pa.parquet.read_table(pa.BufferReader(log.get(name)), schema=label_schema())
        return [Label(**row) for row in table.to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"{log.where}/{name} is not a file of labels ({error}); remove it") from error


def write_labels(log: Log, labels: Iterable[Label], name: str | None = None) -> None:
    """Write labels to a new file, or replace the file ``name``; may raise ``OSError``."""
    pa = arrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist([vars(label) for label in labels], schema=label_schema()), sink)
    log.put(name or labels_path(), sink.getvalue())


def joined(rows: Iterable[Any], labels: Labels, model: str) -> Iterator[Any]:
    """Yield rows with the columns ``verdict``, ``true_label`` and ``verdict_time``, null without a verdict.

    Args:
        rows: Batches from :func:`.rows.read_rows` with at least ``request_id``, ``image_index`` and ``image_sha256``.
        labels: The labels from :func:`read_labels`.
        model: The name of the rows' model.
    """
    pa = arrow()
    for batch in rows:
        keys = zip(*(batch[name].to_pylist() for name in (REQUEST_ID, IMAGE_INDEX, SHA256)), strict=True)
        found = [labels.of(model, *key) for key in keys]
        for name, cells, arrow_type in (
            ("verdict", [each and each.verdict for each in found], pa.string()),
            ("true_label", [each and each.label for each in found], pa.string()),
            ("verdict_time", [each and each.time for each in found], pa.timestamp("us", tz="UTC")),
        ):
            batch = batch.append_column(name, pa.array(cells, arrow_type))
        yield batch
