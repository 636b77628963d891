"""The rows of a log, streamed; memory holds one batch of one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from psc_core.errors import DataError
from psc_core.log.schema import arrow
from psc_core.log.store import Log

_BATCH: Final = 16_384


def models_in(log: Log) -> list[str]:
    """Return the names of the models that have rows; raises ``OSError``."""
    return [name.removeprefix("model=") for name in log.folders() if name.startswith("model=")]


def days_of(log: Log, model: str) -> list[str]:
    """Return the days that have rows of a model, ``YYYY-MM-DD``, the oldest first; raises ``OSError``."""
    return [name.removeprefix("day=") for name in log.folders(f"model={model}") if name.startswith("day=")]


def read_rows(
    log: Log,
    model: str,
    *,
    version: str | None = None,
    audit: bool = False,
    days: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[Any]:
    """Yield the rows of a model as ``pyarrow.RecordBatch``; those of one batch are of one bundle.

    Args:
        log: The log.
        model: Name of the served model.
        version: Of its bundle; None reads all.
        audit: Only the random slice.
        days: ``YYYY-MM-DD``, in the order in which they are read; None reads all, the oldest first.
        columns: Those that are wanted; None gives all of :func:`.schema.row_schema`.

    Raises:
        DataError: A file of the log is damaged.
        OSError: The log cannot be read.
    """
    ds = arrow().dataset
    wanted = ds.scalar(True)
    if version is not None:
        wanted &= ds.field("bundle_version") == version
    if audit:
        wanted &= ds.field("audit")
    for day in days_of(log, model) if days is None else days:
        for name, _ in log.names(f"model={model}/day={day}", suffix=".parquet"):
            try:
                file = ds.dataset(log.path(name), filesystem=log.files, format="parquet")
                for batch in file.to_batches(columns=columns, filter=wanted, batch_size=_BATCH):
                    if batch.num_rows:
                        yield batch
            except (arrow().ArrowInvalid, arrow().ArrowKeyError) as error:
                raise DataError(f"{log.where}/{name} is no file of rows ({error}); remove it") from error
