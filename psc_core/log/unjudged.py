"""The newest stored images that a model abstained from and nobody judged, for a page that shows them.

They were chosen for what they look like.  A verdict on one of them is a label as any other: it counts for a rate only
where its row is of the audit slice anyway (:mod:`psc_core.fitting.audit`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psc_core.errors import DataError
from psc_core.log.labels import label_files
from psc_core.log.rows import days_of, models_in, rows_of_file
from psc_core.log.schema import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, arrow, label_schema, scores_in
from psc_core.log.source import is_stored
from psc_core.log.store import Log

_CHUNK: Final = 500
"""Rows whose verdicts are looked up at once."""


@dataclass(frozen=True)
class Unjudged:
    """A stored image that the model abstained from and nobody judged yet."""

    model: str
    row: Mapping[str, Any]  # its columns but scores and probabilities
    scores: Mapping[str, float]


def newest_unjudged(log: Log, *, limit: int, seconds: float) -> list[Unjudged]:
    """Return such images, the newest first, each once; one whose very bytes were judged in another request is left out.

    Memory holds the rows of one file, without their probabilities.

    Args:
        log: The log.
        limit: Their largest number.
        seconds: After which no further file is opened; what was found until then is returned.

    Raises:
        DataError: A file of the log is damaged.
        OSError: The log cannot be read.
    """
    ends = time.monotonic() + seconds
    found: dict[str, Unjudged] = {}
    for rows in _abstained(log, ends):
        judged = _judged(log, rows)
        for each in rows:
            row, digest = each.row, each.row[SHA256]
            if digest in judged or (row[REQUEST_ID], row[IMAGE_INDEX]) in judged:
                continue
            if is_stored(digest, row[IMAGE_PATH]):
                found.setdefault(digest, each)
            if len(found) >= limit:
                return list(found.values())
    return list(found.values())


def _abstained(log: Log, ends: float) -> Iterator[list[Unjudged]]:
    """Yield stored images that were not accepted, file by file; the files that were written last come first."""
    pa: Any = arrow()
    ds = pa.dataset
    wanted = (ds.field("decision") != "accept") & ds.field(IMAGE_PATH).is_valid() & ds.field(SHA256).is_valid()
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
            yield [Unjudged(model, row, {score: row.pop(score) for score in scores}) for row in rows]


def _files(log: Log) -> Iterator[tuple[str, str]]:
    """Yield the files of rows with their models, those that were written last first."""
    days = sorted({(day, model) for model in models_in(log) for day in days_of(log, model)}, reverse=True)
    for day in dict.fromkeys(day for day, _ in days):
        files = [
            (written, name, model)
            for of, model in days
            if of == day
            for name, written in log.names(f"model={model}/day={day}", suffix=".parquet")
        ]
        yield from ((name, model) for _, name, model in sorted(files, reverse=True))


def _judged(log: Log, rows: Sequence[Unjudged]) -> set[Any]:
    """Return digests, and requests with positions, of those rows that labels name."""
    pa: Any = arrow()
    ds = pa.dataset
    names = [name for name, _ in label_files(log)]
    if not names:
        return set()
    digests, requests = ([each.row[column] for each in rows] for column in (SHA256, REQUEST_ID))
    wanted = ds.field(SHA256).isin(digests) | ds.field(REQUEST_ID).isin(requests)
    try:
        paths = [log.path(name) for name in names]
        files = ds.dataset(paths, filesystem=log.files, format="parquet", schema=label_schema())
        labels = files.to_table(columns=[SHA256, REQUEST_ID, IMAGE_INDEX], filter=wanted).to_pydict()
    except pa.ArrowException as error:
        raise DataError(f"{log.where} has a file of labels that cannot be read ({error}); remove it") from error
    return {*labels[SHA256], *zip(labels[REQUEST_ID], labels[IMAGE_INDEX], strict=True)}
