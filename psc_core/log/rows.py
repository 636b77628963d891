"""The rows of a log, streamed; memory holds one batch of one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from psc_core.errors import DataError, UsageError
from psc_core.log.schema import IMAGE_INDEX, REQUEST_ID, SHA256, arrow
from psc_core.log.store import Log

_BATCH: Final = 16_384


def models_in(log: Log) -> list[str]:
    """Return the names of the models that have rows; raises ``OSError``."""
    return [name.removeprefix("model=") for name in log.folders() if name.startswith("model=")]


def days_of(log: Log, model: str) -> list[str]:
    """Return the days that have rows of a model, ``YYYY-MM-DD``, the oldest first; raises ``OSError``."""
    return [name.removeprefix("day=") for name in log.folders(f"model={model}") if name.startswith("day=")]


def served(log: Log, name: str | None) -> str:
    """Return the name of a model that has rows; None asks for the only one.

    Raises:
        UsageError: There is none of this name, or more than one.
        OSError: The log cannot be read.
    """
    names = models_in(log)
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        given = f"no model {name}" if name else "several models" if names else "no model"
        raise UsageError(f"{log.where} has rows of {given}; it has {', '.join(names) or 'none'}, name one by --model")
    return name


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


def find_row(log: Log, request_id: str, image_index: int) -> dict[str, Any] | None:
    """Return digest and ``bundle_version`` of the row of an image; None where there is none.  Newest days come first.

    Raises:
        DataError: A file of the log is damaged.
        OSError: The log cannot be read.
    """
    days = sorted(((day, model) for model in models_in(log) for day in days_of(log, model)), reverse=True)
    columns = [REQUEST_ID, IMAGE_INDEX, SHA256, "bundle_version"]
    for day, model in days:
        for batch in read_rows(log, model, days=[day], columns=columns):
            ids, indexes = batch[REQUEST_ID].to_pylist(), batch[IMAGE_INDEX].to_pylist()
            if request_id in ids and (request_id, image_index) in (keys := list(zip(ids, indexes, strict=True))):
                row = batch.slice(keys.index((request_id, image_index)), 1).to_pylist()[0]
                return {name: row[name] for name in (SHA256, "bundle_version")}
    return None
