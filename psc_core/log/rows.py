"""Stream the rows of a log; memory holds one batch of one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from psc_core.errors import DataError, UsageError
from psc_core.log.schema import IMAGE_INDEX, REQUEST_ID, SHA256, arrow, row_schema
from psc_core.log.store import Log

_BATCH: Final = 16_384


def models_in(log: Log) -> list[str]:
    """Return the names of the models that have rows; may raise ``OSError``."""
    return [name.removeprefix("model=") for name in log.folders() if name.startswith("model=")]


def days_of(log: Log, model: str, *, since: str | None = None, until: str | None = None) -> list[str]:
    """Return the days with rows of a model as ``YYYY-MM-DD``, the oldest first; may raise ``OSError``."""
    days = [name.removeprefix("day=") for name in log.folders(f"model={model}") if name.startswith("day=")]
    return [day for day in days if (since or day) <= day <= (until or day)]


def logged_model(log: Log, name: str | None) -> str:
    """Return the name of a model that has rows; None asks for the only one.

    Raises:
        UsageError: If there are no rows, no model of this name, or ``name`` is None and there is not exactly one.
        OSError: If the log cannot be read.
    """
    names = models_in(log)
    if not names:
        raise UsageError(f"{log.where} has no rows; give the folder that psc-serve --log writes")
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        given = f"has no rows of model {name}" if name else "has rows of several models"
        raise UsageError(f"{log.where} {given}; it has {', '.join(names)}, name one by --model")
    return name


def read_rows(
    log: Log,
    model: str,
    *,
    audit: bool = False,
    days: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[Any]:
    """Yield the rows of a model as ``pyarrow.RecordBatch``, each with rows of a single bundle.

    Args:
        log: The log.
        model: The name of the served model.
        audit: Read only the audit slice.
        days: Days as ``YYYY-MM-DD`` in the order of reading; None reads all, the oldest first.
        columns: The columns to read, scores only where a file has them; None reads all.

    Raises:
        DataError: If a file of the log is damaged.
        OSError: If the log cannot be read.
    """
    ds = arrow().dataset
    wanted = ds.field("audit") if audit else ds.scalar(True)
    return _scan(log, model, days_of(log, model) if days is None else days, wanted, columns)


def find_row(log: Log, request_id: str, image_index: int) -> dict[str, Any] | None:
    """Return the digest, ``bundle_version`` and ``model`` of an image's row, or None; search the newest days first.

    Raises:
        DataError: If a file of the log is damaged.
        OSError: If the log cannot be read.
    """
    ds = arrow().dataset
    wanted = (ds.field(REQUEST_ID) == request_id) & (ds.field(IMAGE_INDEX) == image_index)
    days = [(day, name) for name in models_in(log) for day in days_of(log, name)]
    for day, model in sorted(days, reverse=True):
        for batch in _scan(log, model, [day], wanted, [SHA256, "bundle_version"]):
            return {**batch.slice(0, 1).to_pylist()[0], "model": model}
    return None


def rows_of_file(
    log: Log, name: str, wanted: Any, columns: Sequence[str] | None = None, without: Sequence[str] = ()
) -> Iterator[Any]:
    """Yield the rows of one file that match a ``pyarrow.dataset`` filter, as :func:`read_rows` does.

    Args:
        log: The log.
        name: The name of the file.
        wanted: The filter.
        columns: The columns to read, scores only where the file has them; None reads all.
        without: The columns to leave out if ``columns`` is None.
    """
    pa = arrow()
    try:
        # Each file is its own data set, because a data set of several files would have only the columns of the first.
        file = pa.dataset.dataset(log.path(name), filesystem=log.files, format="parquet")
        names = file.schema.names
        if columns is None:
            some = [each for each in names if each not in without]
        else:
            some = [each for each in columns if each in names or each in row_schema(()).names]
        batches = file.to_batches(columns=some, filter=wanted, batch_size=_BATCH)
        yield from (batch for batch in batches if batch.num_rows)
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise DataError(f"{log.where}/{name} is not a file of rows ({error}); remove it") from error


def _scan(log: Log, model: str, days: Sequence[str], wanted: Any, columns: Sequence[str] | None) -> Iterator[Any]:
    for day in days:
        for name, _ in log.names(f"model={model}/day={day}", suffix=".parquet"):
            yield from rows_of_file(log, name, wanted, columns)
