"""Find the images of the log that people should review, and write their verdicts to its labels."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from app.errors import ImageConflict, LogUnavailable, UnknownImage, UnusableLabel
from app.log.writer import LogWriter
from psc_core.errors import DataError
from psc_core.log.labels import LABEL, Label, write_labels
from psc_core.log.models import LoggedModel, read_model
from psc_core.log.rows import find_row
from psc_core.log.schema import SHA256
from psc_core.log.source import open_logged_image
from psc_core.log.unreviewed import Unreviewed

_MAX_WAIT_SECONDS: Final = 5.0


def wait_seconds(deadline_s: float) -> float:
    """Return the longest time that a search waits for the writer, and then the longest time that it takes, seconds.

    A third of the deadline is left for reading the models.
    """
    return min(_MAX_WAIT_SECONDS, deadline_s / 3)


def add_verdict(writer: LogWriter, label: Label, *, seconds: float) -> Label:
    """Write a verdict and return it as written.  It may take seconds, so call it on a thread.

    Args:
        writer: The writer of the log, which is flushed if the row is not found otherwise.
        label: The verdict on an image, which it names by request and position.
        seconds: The result of :func:`wait_seconds`.

    Raises:
        UnknownImage: If the log has no row of the image.
        ImageConflict: If the row is of another image, or of one that was erased.
        UnusableLabel: If the row's model could not have given this label.
        LogUnavailable: If the log cannot be read or written.
    """
    try:
        row = _row(writer, label, seconds)
        if label.image_sha256 is not None and label.image_sha256 != row[SHA256]:
            shown = "an image that was erased" if row[SHA256] is None else f"the image {row[SHA256]}"
            raise ImageConflict(
                f"the row is of {shown}, not of {label.image_sha256}; correct request_id or image_index"
            )
        checked = replace(label, image_sha256=row[SHA256], time=datetime.now(UTC), model=row["model"])
        if label.verdict == LABEL:
            model = read_model(writer.log, row["bundle_version"])
            try:
                checked = replace(checked, label=model.check_label(label.label or ""))
            except DataError as error:
                raise UnusableLabel(str(error)) from error
        write_labels(writer.log, [checked])
    except (OSError, DataError) as error:
        raise LogUnavailable("the prediction log cannot be used now; psc-log review names a damaged file") from error
    return checked


def to_review(writer: LogWriter, limit: int, *, seconds: float) -> tuple[list[Unreviewed], dict[str, LoggedModel]]:
    """Return the newest logged images that were not accepted and have no verdict, and their models by version.

    It may take seconds, so call it on a thread.

    Args:
        writer: The writer of the log, which is flushed first.
        limit: The maximum number of images.
        seconds: The result of :func:`wait_seconds`.

    Raises:
        LogUnavailable: If the log cannot be read.
    """
    writer.flush(seconds)
    try:
        found = writer.unreviewed.newest(limit=limit, seconds=seconds)
        versions = {each.row["bundle_version"] for each in found}
        return found, {version: read_model(writer.log, version) for version in sorted(versions)}
    except (OSError, DataError) as error:
        raise LogUnavailable("the prediction log cannot be read now; psc-log review names a damaged file") from error


def logged_image(writer: LogWriter, name: str) -> tuple[Any, int]:
    """Open a logged image and return it with its size in bytes; call it on a thread.

    Raises:
        UnknownImage: If the log has no such image.
        LogUnavailable: If the log cannot be read.
    """
    try:
        return open_logged_image(writer.log, name)
    except FileNotFoundError as error:
        raise UnknownImage("the log has no such image; it was not stored, was erased or is too old") from error
    except OSError as error:
        raise LogUnavailable("the prediction log cannot be read now; try again later") from error


def _row(writer: LogWriter, label: Label, seconds: float) -> dict[str, Any]:
    key = label.request_id or "", label.image_index or 0
    row = find_row(writer.log, *key)
    if row is None and writer.flush(seconds):
        row = find_row(writer.log, *key)
    if row is None:
        raise UnknownImage(
            f"the log has no row of image {key[1]} of request {key[0]!r}; it was not drawn (log_rows), or another "
            "worker still holds it: try again after log_flush_seconds"
        )
    return row
