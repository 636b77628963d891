"""The files of a log, in a folder or a bucket, through pyarrow's file systems: each appears whole under its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from psc_core.errors import UsageError
from psc_core.log.schema import arrow

_OPTIONS: Final = ("region", "endpoint_override")

_SECONDS: Final = 3.0
"""The time after which a bucket that accepts no connection or does not answer is given up."""


@dataclass(frozen=True)
class Log:
    """A log; all paths are relative to it, with ``/`` as separator."""

    where: str  # the place of the log as the user named it
    files: Any  # the pyarrow file system that holds it
    root: str  # its path in that file system

    def path(self, name: str) -> str:
        """Return the path of a file in :attr:`files`."""
        return f"{self.root}/{name}"

    def put(self, name: str, data: Any, *, synced: bool = True) -> None:
        """Write or replace a file; until it is complete, readers see the old file or none.

        Args:
            name: The path of the file.
            data: bytes, or a buffer.
            synced: Wait until the data is on the disk; otherwise a power cut may leave an incomplete file under this
                name.

        Raises:
            OSError: If it could not be written; at worst a file with a leading dot is left.
        """
        if self.is_folder:
            _put_local(Path(self.path(name)), data, synced=synced)
            return
        # An object exists only once it is closed; if writing fails, it never exists.
        with self.files.open_output_stream(self.path(name)) as stream:
            stream.write(data)

    def get(self, name: str) -> bytes:
        """Return a file's content; may raise :class:`FileNotFoundError` or another ``OSError``."""
        with self.files.open_input_stream(self.path(name)) as stream:
            content: bytes = stream.read()
            return content

    def delete(self, name: str) -> None:
        """Remove a file; may raise ``OSError``."""
        self.files.delete_file(self.path(name))

    def written(self, name: str) -> datetime | None:
        """Return the time when a file was written (UTC), or None if it does not exist; may raise ``OSError``."""
        found: datetime | None = self.files.get_file_info(self.path(name)).mtime
        return found

    def names(self, folder: str = "", *, suffix: str = "") -> Iterator[tuple[str, datetime]]:
        """Yield the files below a folder that end in ``suffix`` with their times of writing (UTC), in order of names.

        Raises:
            OSError: If the log cannot be read.
        """
        for name, written in self._all(folder):
            if name.endswith(suffix) and not _is_partial(name):
                yield name, written

    def partial(self, folder: str = "") -> Iterator[tuple[str, datetime]]:
        """Yield the files below a folder that are being written or were never completed; may raise ``OSError``."""
        if self.is_folder:  # buckets never show incomplete files
            yield from (each for each in self._all(folder) if _is_partial(each[0]))

    def _all(self, folder: str) -> Iterator[tuple[str, datetime]]:
        fs = arrow().fs
        base = self.path(folder).rstrip("/")
        found = self.files.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
        for info in sorted(found, key=lambda each: each.path):
            if info.type == fs.FileType.File:
                yield info.path.removeprefix(f"{self.root}/"), info.mtime

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder, in order; may raise ``OSError``."""
        fs = arrow().fs
        found = self.files.get_file_info(fs.FileSelector(self.path(folder).rstrip("/"), allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == fs.FileType.Directory)

    @property
    def is_folder(self) -> bool:
        """True if the log is a folder of this machine, and not a bucket."""
        return isinstance(self.files, arrow().fs.LocalFileSystem)


def open_log(where: str | Path) -> Log:
    """Open a log, which need not exist before something is written to it.

    Args:
        where: A folder, or ``s3://BUCKET/PREFIX``, optionally with ``?region=…&endpoint_override=http://…``.  The keys
            of a bucket are found where AWS's tools find them.

    Raises:
        UsageError: If pyarrow is not installed, or ``where`` is neither.
    """
    fs = arrow().fs
    text = str(where)
    if "://" not in text:
        return Log(text, fs.LocalFileSystem(), str(Path(text).absolute()))
    if not text.startswith("s3://"):
        raise UsageError(f"expected a folder or s3://BUCKET/PREFIX, got {text!r}")
    parts = urlsplit(text)
    options = dict(parse_qsl(parts.query))
    if not parts.netloc or (unknown := sorted(options.keys() - _OPTIONS)):
        wrong = f"the option {unknown[0]}" if parts.netloc else "no bucket"
        raise UsageError(f"expected s3://BUCKET/PREFIX with at most {' and '.join(_OPTIONS)}, got {wrong}; correct it")
    scheme, _, endpoint = options.get("endpoint_override", "").rpartition("://")
    try:
        region = options.get("region") or (None if endpoint else fs.resolve_s3_region(parts.netloc))
        files = fs.S3FileSystem(
            region=region,
            scheme=scheme or "https",
            endpoint_override=endpoint or None,
            connect_timeout=_SECONDS,
            request_timeout=_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # retries would keep a process from ending
            allow_delayed_open=True,  # one request for a small file instead of three
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{text} cannot be opened ({error}); check the bucket, or give ?region=") from error
    return Log(text.partition("?")[0], files, f"{parts.netloc}{parts.path}".rstrip("/"))


def open_to_write(where: str | Path) -> Log:
    """Open a log, and check that a folder is writable; a bucket is not checked, because it may be down for a moment.

    Raises:
        UsageError: If :func:`open_log` raises it, or the folder is not writable.
    """
    log = open_log(where)
    if log.is_folder:
        probe = f".probe.{uuid4().hex}"  # unique, so that no worker deletes another's
        try:
            log.put(probe, b"")
            log.delete(probe)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"the log {where} cannot be written to ({reason}); choose another folder") from error
    return log


def _is_partial(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith(".")


def _put_local(path: Path, data: Any, *, synced: bool) -> None:
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        try:
            file = partial.open("wb")
        except FileNotFoundError:
            # Only here, because the folder of a day or of a digest is nearly always there.
            path.parent.mkdir(parents=True, exist_ok=True)
            file = partial.open("wb")
        with file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
