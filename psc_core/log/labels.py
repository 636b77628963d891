"""The verdicts of people on logged images; the last one on an image wins.

A label names its image by request and position, by the digest of its bytes, or by both.  One by the digest alone holds
for every row of that image.
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


class Labels:
    """The last verdict on each image.

    Args:
        labels: In any order; of two with the same time the later one counts.
    """

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        self._of_row: dict[tuple[str | None, int | None], Label] = {}
        self._of_image: dict[str, Label] = {}
        for label in sorted(labels, key=lambda each: each.time):
            if label.request_id is not None:
                self._of_row[label.request_id, label.image_index] = label
            elif label.image_sha256 is not None:
                self._of_image[label.image_sha256] = label

    def __len__(self) -> int:
        return len(self._of_row) + len(self._of_image)

    def of(self, request_id: str, image_index: int, image_sha256: str | None) -> Label | None:
        """Return the last verdict on the image of a row; None where nobody gave one."""
        found = self._of_row.get((request_id, image_index)), self._of_image.get(image_sha256 or "")
        given = [each for each in found if each is not None]
        return max(given, key=lambda each: each.time) if given else None


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


def joined(rows: Iterable[Any], labels: Labels) -> Iterator[Any]:
    """Yield batches of rows with the columns ``verdict`` and ``true_label``, null where nobody gave a verdict.

    Args:
        rows: From :func:`.rows.read_rows`, with at least the columns ``request_id``, ``image_index``, ``image_sha256``.
        labels: From :func:`read_labels`.
    """
    pa = arrow()
    for batch in rows:
        keys = zip(*(batch[name].to_pylist() for name in (REQUEST_ID, IMAGE_INDEX, SHA256)), strict=True)
        found = [labels.of(*key) for key in keys]
        for name, cells in (
            ("verdict", [each and each.verdict for each in found]),
            ("true_label", [each and each.label for each in found]),
        ):
            batch = batch.append_column(name, pa.array(cells, pa.string()))
        yield batch
