"""A log's files, in a folder or a bucket, through pyarrow's file systems: each appears whole under its name."""

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
"""A bucket that has not accepted a connection, or answers nothing for so long, cannot be used."""


@dataclass(frozen=True)
class Log:
    """A log; paths are relative to it, with ``/`` between their parts.

    Attributes:
        where: As the user named it.
        files: The pyarrow file system that holds it.
        root: Its path there.
    """

    where: str
    files: Any
    root: str

    def path(self, name: str) -> str:
        """Return the path of a file in :attr:`files`."""
        return f"{self.root}/{name}"

    def put(self, name: str, data: Any, *, synced: bool = True) -> None:
        """Write a file, or replace it; until it is complete there is none of this name, or the old one.

        Args:
            name: Its path.
            data: bytes, or a buffer.
            synced: Wait until the disk has it: without, a power cut may leave the name with less behind it.

        Raises:
            OSError: It could not be written; nothing of it is left but, at worst, a name with a dot.
        """
        if self.is_folder:
            _put_local(Path(self.path(name)), data, synced=synced)
            return
        # An object exists once it is closed; one that fails before never does.
        with self.files.open_output_stream(self.path(name)) as stream:
            stream.write(data)

    def get(self, name: str) -> bytes:
        """Return a file's content; raises :class:`FileNotFoundError` or another ``OSError``."""
        with self.files.open_input_stream(self.path(name)) as stream:
            content: bytes = stream.read()
            return content

    def delete(self, name: str) -> None:
        """Remove a file; raises ``OSError``."""
        self.files.delete_file(self.path(name))

    def written(self, name: str) -> datetime | None:
        """Return when a file was written (UTC); None where there is none.  Raises ``OSError``."""
        found: datetime | None = self.files.get_file_info(self.path(name)).mtime
        return found

    def names(self, folder: str = "", *, suffix: str = "") -> Iterator[tuple[str, datetime]]:
        """Yield the files below a folder with such names, each with when it was written (UTC), in order of the names.

        Raises:
            OSError: The log cannot be read.
        """
        for name, written in self._all(folder):
            if name.endswith(suffix) and not _is_partial(name):
                yield name, written

    def partial(self, folder: str = "") -> Iterator[tuple[str, datetime]]:
        """Yield the files below a folder that are being written, or never were complete; raises ``OSError``."""
        if self.is_folder:  # A bucket shows none.
            yield from (each for each in self._all(folder) if _is_partial(each[0]))

    def _all(self, folder: str) -> Iterator[tuple[str, datetime]]:
        fs = arrow().fs
        base = self.path(folder).rstrip("/")
        found = self.files.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
        for info in sorted(found, key=lambda each: each.path):
            if info.type == fs.FileType.File:
                yield info.path.removeprefix(f"{self.root}/"), info.mtime

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder, in order; raises ``OSError``."""
        fs = arrow().fs
        found = self.files.get_file_info(fs.FileSelector(self.path(folder).rstrip("/"), allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == fs.FileType.Directory)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return isinstance(self.files, arrow().fs.LocalFileSystem)


def open_log(where: str | Path) -> Log:
    """Open a log that is there, or that will be once something is written to it.

    Args:
        where: A folder, or ``s3://BUCKET/PREFIX``, perhaps with ``?region=…&endpoint_override=http://…``; the keys
            of a bucket are found where AWS's tools find them.

    Raises:
        UsageError: pyarrow is not installed, or it is neither.
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
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # A process ends when its last attempt has.
            allow_delayed_open=True,  # One request for a small file in place of three.
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{text} cannot be opened ({error}); check the bucket, or give ?region=") from error
    return Log(text.partition("?")[0], files, f"{parts.netloc}{parts.path}".rstrip("/"))


def open_to_write(where: str | Path) -> Log:
    """Open a log and make sure that a folder can be written to; a bucket is not asked, it may be away for a moment.

    Raises:
        UsageError: As :func:`open_log`, or the folder cannot be written to.
    """
    log = open_log(where)
    if log.is_folder:
        try:
            log.put(".probe", b"")
            log.delete(".probe")
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
