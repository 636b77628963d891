"""Find the newest logged images that a model abstained on and nobody has reviewed, for a page that shows them.

These images were chosen for their content.  A verdict on one of them is a label like any other: it counts for a rate
only if its row belongs to the audit slice anyway (:mod:`psc_core.fitting.audit`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psc_core.errors import DataError
from psc_core.log.labels import label_files, label_keys, row_keys
from psc_core.log.rows import days_of, models_in, rows_of_file
from psc_core.log.schema import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, arrow, label_schema, scores_in
from psc_core.log.source import is_stored
from psc_core.log.store import Log
from psc_core.tasks.answer import ACCEPT

_CHUNK: Final = 500
"""Maximum number of rows that are converted to Python objects at a time."""

_FILES: Final = 200
"""Maximum number of files of labels that are read at a time."""


@dataclass(frozen=True)
class Unreviewed:
    """A logged image that the model abstained on and nobody has reviewed yet."""

    model: str
    row: Mapping[str, Any]  # its columns without scores and probabilities
    scores: Mapping[str, float]


class UnreviewedImages:
    """Finds these images, and reads each file of labels only once, because a service writes one for each verdict.

    Memory holds 0.1 KiB for each label, and the rows of one file without their probabilities.  Not thread-safe.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._read: set[str] = set()
        self._reviewed: set[int] = set()  # hashes of the keys of reviewed images

    def newest(self, *, limit: int, seconds: float) -> list[Unreviewed]:
        """Return the newest unreviewed images, each once even if its bytes came in several requests.

        Args:
            limit: Maximum number of images.
            seconds: The time after which no further file is opened; the result then has the images found so far, and
                may include some with labels that were not read in time.

        Raises:
            DataError: If a file of the log is damaged.
            OSError: If the log cannot be read.
        """
        ends = time.monotonic() + seconds
        self._read_labels(ends)
        found: dict[str, Unreviewed] = {}
        for each in _abstained(self._log, ends):
            row, digest = each.row, each.row[SHA256]
            keys = row_keys(each.model, row[REQUEST_ID], row[IMAGE_INDEX], digest)
            if self._reviewed.isdisjoint(map(hash, keys)) and is_stored(digest, row[IMAGE_PATH]):
                found.setdefault(digest, each)
            if len(found) >= limit:
                break
        return list(found.values())

    def _read_labels(self, ends: float) -> None:
        """Read the files of labels that have not been read yet, the newest first."""
        files = sorted(label_files(self._log), key=lambda each: each[1], reverse=True)
        new = [name for name, _ in files if name not in self._read]
        for start in range(0, len(new), _FILES):
            if time.monotonic() > ends:
                return
            names = new[start : start + _FILES]
            for named in _named(self._log, names):
                self._reviewed.update(map(hash, label_keys(*named)))
            self._read.update(names)


def _abstained(log: Log, ends: float) -> Iterator[Unreviewed]:
    """Yield logged images that were not accepted, file by file, the files that were written last first."""
    pa: Any = arrow()
    ds = pa.dataset
    wanted = (ds.field("decision") != ACCEPT) & ds.field(IMAGE_PATH).is_valid() & ds.field(SHA256).is_valid()
    for name, model in _files(log):
        if time.monotonic() > ends:
            return
        batches = list(rows_of_file(log, name, wanted, without=["probabilities"]))
        if not batches:
            continue
        table = pa.Table.from_batches(batches).sort_by([("time", "descending")])
        scores = scores_in(table.schema)
        for start in range(0, len(table), _CHUNK):
            rows = table.slice(start, _CHUNK).to_pylist()
            yield from (Unreviewed(model, row, {score: row.pop(score) for score in scores}) for row in rows)


def _files(log: Log) -> Iterator[tuple[str, str]]:
    """Yield the files of rows with their models, the files that were written last first."""
    days = sorted({(day, model) for model in models_in(log) for day in days_of(log, model)}, reverse=True)
    for day in dict.fromkeys(day for day, _ in days):
        files = [
            (written, name, model)
            for of, model in days
            if of == day
            for name, written in log.names(f"model={model}/day={day}", suffix=".parquet")
        ]
        yield from ((name, model) for _, name, model in sorted(files, reverse=True))


def _named(log: Log, names: Sequence[str]) -> Iterator[tuple[str | None, str | None, int | None, str | None]]:
    """Yield the model, request, position and digest of each label in some files."""
    pa: Any = arrow()
    try:
        paths = [log.path(name) for name in names]
        files = pa.dataset.dataset(paths, filesystem=log.files, format="parquet", schema=label_schema())
        labels = files.to_table(columns=["model", REQUEST_ID, IMAGE_INDEX, SHA256])
    except pa.ArrowException as error:
        raise DataError(f"{log.where} has a file of labels that cannot be read ({error}); remove it") from error
    yield from zip(*(column.to_pylist() for column in labels), strict=True)
