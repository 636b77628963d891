"""Remove from a log one image wherever it occurs, or everything that is too old."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from threading import Event
from typing import Any, Final
from uuid import uuid4

from psc_core.errors import UsageError
from psc_core.log import store
from psc_core.log.labels import label_files, read_label_file, write_labels
from psc_core.log.store import IMAGE_INDEX, IMAGE_PATH, IMAGES, LABELS, REQUEST_ID, SHA256, Log

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_WRITTEN: Final = re.compile(rf"{LABELS}/written-(\d{{4}}-\d\d-\d\d)-")  # labels from which some were erased
_LOCK: Final = "erase.lock"  # of a folder; it has no dot, or it would be removed as incomplete
_RUNNING: Final = "erasing"  # where a bucket names those that run
_PARTIAL_AGE: Final = timedelta(hours=1)  # the age after which an incomplete file will never be completed


@dataclass(frozen=True)
class Erased:
    files: int = 0  # removed
    labels: int = 0  # removed
    rows: int = 0  # that no longer name the image


@dataclass(frozen=True)
class Pruned:
    row_files: int = 0
    images: int = 0
    label_files: int = 0
    partial: int = 0  # never completed


def erase(log: Log, sha256: str) -> Erased:
    """Remove an image's file, complete or not, its digest and path in every row that is written, and its labels."""
    sha256 = sha256.lower()
    if _DIGEST.fullmatch(sha256) is None:
        raise UsageError(
            f"expected a SHA-256 of 64 hexadecimal digits, got {sha256[:80]!r}; `sha256sum FILE` prints it"
        )
    with _alone(log):
        return _erase(log, sha256)


@contextmanager
def _alone(log: Log) -> Iterator[None]:
    """Let nobody else rewrite files, who would write back what this one removed.

    In a folder one waits for the other.  A bucket has no locks, so each names itself before it looks for others: of two
    at least one sees the other, and ends.
    """
    if log.is_folder:
        if not Path(log.root).is_dir():
            raise UsageError(f"there is no folder {log.where}; give the one that psc-serve --log writes")
        import fcntl

        with Path(log.path(_LOCK)).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        return
    own = f"{_RUNNING}/{uuid4().hex}"
    log.put(own, b"")
    try:
        if others := [name for name, _ in log.names(_RUNNING) if name != own]:
            raise UsageError(
                f"another psc-log delete works on {log.where}; run this one when it has ended, or, if it was killed, "
                f"when you have removed {log.where}/{others[0]}"
            )
        yield
    finally:
        log.delete(own)


def _erase(log: Log, sha256: str) -> Erased:
    folder = f"{IMAGES}/{sha256[:2]}"
    # Incomplete files first: one that is completed in the meantime is then found by its final name.
    files = _delete(log, (name for name, _ in log.partial(folder) if name.startswith(f"{folder}/.{sha256}")))
    files += _delete(log, (name for name, _ in log.names(folder) if name.startswith(f"{folder}/{sha256}")))
    _delete_partial(log, datetime.now(UTC))  # incomplete files of rows and labels may name the image
    keys: set[tuple[str, int]] = set()
    for model in store.models_in(log):
        for name, _ in log.names(f"model={model}", suffix=".parquet"):
            keys |= _forget(log, name, sha256)
    labels = 0
    for name, written in label_files(log):
        try:
            found = read_label_file(log, name)
        except FileNotFoundError:  # It was pruned.
            continue
        left = [
            each for each in found if each.image_sha256 != sha256 and (each.request_id, each.image_index) not in keys
        ]
        if len(left) < len(found):
            labels += len(found) - len(left)
            kept = name if _WRITTEN.match(name) else f"{LABELS}/written-{written:%Y-%m-%d}-{name.rsplit('/', 1)[1]}"
            if left:
                write_labels(log, left, kept)
            if not left or kept != name:
                _delete(log, [name])
    return Erased(files, labels, len(keys))


def prune(log: Log, days: int, now: datetime | None = None, *, ended: Event | None = None) -> Pruned:
    """Remove rows of days that ended over ``days`` days ago, older images and labels, and incomplete files."""
    ended = ended or Event()
    now = (now or datetime.now(UTC)).astimezone(UTC)
    first = now.date() - timedelta(days)
    begins = datetime.combine(first, time(), UTC)
    row_files = 0
    for model in store.models_in(log):
        for day in store.days_of(log, model):
            if day < first.isoformat():
                row_files += _delete(log, (name for name, _ in log.names(f"model={model}/day={day}")), ended)
                if not ended.is_set():
                    with suppress(OSError):  # another process may have deleted it
                        log.files.delete_dir(log.path(f"model={model}/day={day}"))
    # Ask for the time again: a listed file may have been rewritten for a new row while thousands of others were
    # removed.
    old = (name for name, at in log.names(IMAGES) if at < begins and (log.written(name) or now) < begins)
    images = _delete(log, old, ended)
    labels = _delete(log, (name for name, at in label_files(log) if _first_written(name, at) < begins), ended)
    return Pruned(row_files, images, labels, _delete_partial(log, now, ended))


def _first_written(name: str, written: datetime) -> datetime:
    """Return the time when a file of labels was first written, before some of them were erased."""
    day = _WRITTEN.match(name)
    return datetime.fromisoformat(day[1]).replace(tzinfo=UTC) if day else written


def _delete_partial(log: Log, now: datetime, ended: Event | None = None) -> int:
    return _delete(log, (name for name, written in log.partial() if written < now - _PARTIAL_AGE), ended)


def _delete(log: Log, names: Iterable[str], ended: Event | None = None) -> int:
    count = 0
    for name in names:
        if ended is not None and ended.is_set():
            break
        with suppress(FileNotFoundError):  # another process removed or completed it
            log.delete(name)
            count += 1
    return count


def _forget(log: Log, name: str, sha256: str) -> set[tuple[str, int]]:
    """Clear the digest and path in one file's rows of an image; return the requests and positions of these rows."""
    pa: Any = store.arrow()
    try:
        with store.naming_damage(log, name, "rows"):
            content = pa.BufferReader(log.get(name))
            digests = pa.parquet.read_table(content, columns=[SHA256])[SHA256].to_pylist()
            if sha256 not in digests:
                return set()
            table = pa.parquet.read_table(content)
    except FileNotFoundError:  # It was pruned.
        return set()
    at = [row for row, digest in enumerate(digests) if digest == sha256]
    for column in (SHA256, IMAGE_PATH):
        cells = table[column].to_pylist()
        for row in at:
            cells[row] = None
        table = table.set_column(table.schema.get_field_index(column), column, pa.array(cells, pa.string()))
    found = table.select([REQUEST_ID, IMAGE_INDEX]).take(at).to_pylist()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, compression="zstd")
    log.put(name, sink.getvalue())
    return {(row[REQUEST_ID], row[IMAGE_INDEX]) for row in found}
