"""Find the images of the log that people should review, and write their labels to its labels."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, Final, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import StreamingResponse

from app.errors import DeadlineExceeded, ImageConflict, MalformedRequest, UnknownImage, UnusableLabel, responses
from app.http.body import load_json, parse, parse_query, query_parameters, read_json_body
from app.http.model import ClassNames, PredictedNumber, TaskName
from app.log import LogWriter
from app.service import service_to
from psc_core.answers import ACCEPT, CLASSIFICATION_DECISIONS, REGRESSION_DECISIONS, Document
from psc_core.errors import DataError, fault
from psc_core.log.labels import (
    LABEL,
    MAX_NAME,
    NONE_OF_THE_CLASSES,
    Label,
    LabelKind,
    check_label,
    check_name,
    write_labels,
)
from psc_core.log.review import Unreviewed
from psc_core.log.store import IMAGE_PATH, MEDIA_TYPES, SHA256, LoggedModel, find_row, open_logged_image, read_model


# These functions work on the log and may take seconds, so they are for :meth:`.Service.search_log`.
def add_label(writer: LogWriter, label: Label) -> FeedbackDocument:
    row = _row(writer, label)
    if row[SHA256] is None or label.image_sha256 not in (None, row[SHA256]):
        shown = "an image that was erased" if row[SHA256] is None else f"the image {row[SHA256]}"
        raise ImageConflict(
            f"the row is of {shown}, not of {label.image_sha256 or 'one to label'}; correct request_id or image_index"
        )
    checked = replace(label, image_sha256=row[SHA256], time=datetime.now(UTC), model=row["model"])
    models, is_class = [], label.kind == LABEL
    if label.label is not None:
        models = [read_model(writer.log, row["bundle_version"]), *filter(None, [writer.served.get(row["model"])])]
    try:
        text = check_name(label.label or "", *([] if is_class else models[:1]))
        text = check_label(text, models) if is_class else text[:MAX_NAME]
        checked = replace(checked, label=text or None)
    except DataError as error:
        raise UnusableLabel(str(error)) from error
    write_labels(writer.log, [checked])
    given = {name: cell for name, cell in vars(checked).items() if name in FeedbackDocument.model_fields}
    return FeedbackDocument(**given, is_stored=row[IMAGE_PATH] is not None)


def to_review(writer: LogWriter, query: _ReviewQuery) -> tuple[list[Unreviewed], dict[str, LoggedModel], date | None]:
    """Return the logged images without a label or a name, their models by version, and how far back the search came."""
    writer.flush(seconds := writer.search_seconds)
    if query.to_name:
        found = writer.review.to_name(query.limit, seconds, query.model)
    else:
        found = writer.review.newest(query.limit, seconds, query.decision.split(","), query.model)
    models = {each: read_model(writer.log, each) for each in {image.row["bundle_version"] for image in found}}
    return found, models, writer.review.back_to


def count_checked(writer: LogWriter, name: str, version: str, since: datetime) -> CheckedDocument:
    checked, right = writer.review.checked(name, version, since, writer.search_seconds)
    return CheckedDocument(checked=checked, right=right, back_to=writer.review.back_to)


def logged_image(writer: LogWriter, name: str) -> tuple[Any, int]:
    """Open a logged image and return it with its size in bytes."""
    try:
        return open_logged_image(writer.log, name)
    except FileNotFoundError as error:
        raise UnknownImage("the log has no such image; it was not stored, was erased or is too old") from error


def _row(writer: LogWriter, label: Label) -> dict[str, Any]:
    key = label.request_id or "", label.image_index or 0
    searched: dict[str, str] = {}
    row, is_over = _search(writer, key, searched)
    if row is None and writer.flush(writer.search_seconds):
        row, is_over = _search(writer, key, searched)
    if row is None and is_over:
        raise DeadlineExceeded(
            f"no row of image {key[1]} of request {key[0]!r} was found back to "
            f"{next(reversed(searched.values()), 'today')}, when the time was over; give labels of older images to "
            "psc-log import"
        )
    if row is None:
        raise UnknownImage(
            f"the log has no row of image {key[1]} of request {key[0]!r}; it was not drawn (log_rows), or another "
            "replica still holds it: try again after log_flush_seconds"
        )
    return row


def _search(writer: LogWriter, key: tuple[str, int], searched: dict[str, str]) -> tuple[dict[str, Any] | None, bool]:
    """Return the row, and whether the time is over."""
    ends = time.monotonic() + writer.search_seconds
    return find_row(writer.log, *key, ends, searched), time.monotonic() > ends


class Feedback(BaseModel):
    """A label on one image of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request_id: str = Field(
        min_length=1, max_length=100, description="The answer's header `traceresponse`, or its part `TRACE-SPAN`."
    )
    image_index: int = Field(default=0, ge=0, lt=1 << 31, description="Position of the image in the request, from 0.")
    image_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the file that was sent; checked if given."
    )
    kind: LabelKind = Field(default=LABEL)
    label: str | int | float | None = Field(
        default=None,
        description="The true class or number, required of the kind `label`; or a name of what is none of the classes.",
    )
    source: str = Field(default="feedback", min_length=1, max_length=200, description="The origin of the label.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.label is None) == (self.kind == LABEL) and self.kind != NONE_OF_THE_CLASSES:
            raise ValueError("expected a label of the kind label, and none of the kind cannot_tell")
        return self

    def to_label(self) -> Label:
        """Return the label as a label of the log, without checking it against a row."""
        parts = self.request_id.split("-")
        name = "-".join(parts[1:3]) if len(parts) == 4 else self.request_id
        text = None if self.label is None else str(self.label)
        return Label(name, self.image_index, self.image_sha256, self.kind, text, self.source, datetime.now(UTC))


class FeedbackDocument(Document):
    """A label as it was written to the log."""

    request_id: str
    image_index: int
    image_sha256: str | None
    kind: str
    label: str | None
    is_stored: bool = Field(description="Whether the log has the image of this row, which what reads labels needs.")


_BODY: Final = {"required": True, "content": {"application/json": {"schema": Feedback.model_json_schema()}}}
router = APIRouter(tags=["feedback"])


@router.post(
    "/feedback",
    summary="Say what an image shows",
    responses=responses(400, 401, 403, 404, 408, 409, 415, 422, 504),
    openapi_extra={"requestBody": _BODY},
)
async def feedback(request: Request) -> FeedbackDocument:
    """Add a person's label on an image to the prediction log (with `--log`); the last label counts."""
    service = service_to("feedback", request)
    body = await read_json_body(request, service.settings.upload_seconds)
    try:
        given = Feedback.model_validate(await parse(service.parser, body, load_json, body))
    except ValidationError as error:
        raise MalformedRequest(fault(error.errors(include_input=False, include_url=False)[0], "member")) from error
    label = await service.search_log(lambda log: add_label(log, given.to_label()))
    service.metrics.psc_feedback_total.labels(kind=label.kind).inc()
    return label


MAX_IMAGES: Final = 50
_NAMES: Final = "|".join(dict.fromkeys((*CLASSIFICATION_DECISIONS, *REGRESSION_DECISIONS)))
_BLOCK_BYTES: Final = 1 << 16
# The headers of a logged image: anyone may have sent it, so it must not run; and it may be erased, so it must not be
# cached.
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cache-Control": "no-store",
}


class ImageToReview(Document):
    """A logged image without a label, or without a name of its own."""

    request_id: str
    image_index: int
    image_sha256: str
    file: str = Field(description="The image's name at `/feedback/images/{file}`.")
    time: datetime = Field(description="The time of the answer.")
    model: str
    bundle_version: str
    decision: str
    name: str | None = Field(description="The name of its cluster, with `to_name`; else null.")
    label: str | None = Field(description="The most probable class; null for a regression.")
    likely: dict[str, float] = Field(description="The most probable classes, at most ten, with their probabilities.")
    policy: dict[str, Any] = Field(description="The thresholds behind the decision.")
    scores: dict[str, float] = Field(description="The scores of the answer, by name.")
    checks: dict[str, float] = Field(description="The p-value of each check.")


class ReviewedModel(Document):
    """A model of the listed images, and the labels that they may get."""

    task: TaskName
    classes: ClassNames
    target: PredictedNumber


_BACK_TO: Final = "The day back to which the log was searched, where there was no time for all of it; else null."


class ReviewDocument(Document):
    """Images for people to review."""

    images: list[ImageToReview] = Field(description="The images, the newest first, or by cluster.")
    models: dict[str, ReviewedModel] = Field(description="Their models, by `bundle_version`.")
    back_to: date | None = Field(description=_BACK_TO)


class _ReviewQuery(BaseModel):
    limit: int = Field(default=12, ge=1, le=MAX_IMAGES, description="Maximum number of images.")
    model: str | None = Field(default=None, description="Only images of this model.")
    decision: str = Field(
        default=_NAMES.removeprefix(f"{ACCEPT}|").replace("|", ","),
        pattern=f"^({_NAMES})(,({_NAMES}))*$",
        description="Decisions, separated by commas; `accept` lists accepted images of the random sample.",
    )
    to_name: bool = Field(
        default=False,
        description="Instead those of any decision that people reviewed as none of the classes and only `psc-log "
        "review --clusters` named, cluster by cluster, the largest first.",
    )


review_router = APIRouter(tags=["feedback"], responses=responses(401, 403, 504))


@review_router.get(
    "/feedback/images",
    summary="Images to review",
    responses=responses(400),
    openapi_extra={"parameters": query_parameters(_ReviewQuery)},
)
async def images(request: Request) -> ReviewDocument:
    """List the newest logged images (with `--log`) without a label, by default those that were not accepted.

    `POST /feedback` takes a label on them.
    """
    service = service_to("feedback", request)
    query = parse_query(_ReviewQuery, request)
    found, models, back_to = await service.search_log(lambda log: to_review(log, query))
    reviewed = {
        version: ReviewedModel(task=each.task.name, classes=list(each.classes), target=each.task.number())
        for version, each in models.items()
    }
    return ReviewDocument(images=[_image(each, models) for each in found], models=reviewed, back_to=back_to)


class CheckedDocument(Document):
    """The accepted images of the random sample that people have labelled; none of a regression."""

    checked: int = Field(description="Their number, of the model as it is served now, in the last seven days.")
    right: int = Field(description="Those with the label that was answered.")
    back_to: date | None = Field(description=_BACK_TO)


@review_router.get("/models/{name}/checked", summary="Checked answers", responses=responses(404))
async def checked(request: Request, name: str) -> CheckedDocument:
    """Count the accepted images of the random sample that people have labelled, but for `cannot_tell`."""
    service = service_to("feedback", request)
    version, since = service.registry.get(name).model.version, datetime.now(UTC) - timedelta(days=7)
    return await service.search_log(lambda log: count_checked(log, name, version, since))


@review_router.get(
    "/feedback/images/{file}",
    summary="A logged image",
    response_class=StreamingResponse,
    responses={200: {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}, **responses(404)},
)
async def image(request: Request, file: str) -> StreamingResponse:
    """Return one of these images, with its bytes as received."""
    service = service_to("feedback", request)
    opened, size = await service.search_log(lambda log: logged_image(log, file))
    media_type = MEDIA_TYPES.get(file.rpartition(".")[2], "application/octet-stream")
    return StreamingResponse(_blocks(opened), headers={**_HEADERS, "Content-Length": str(size)}, media_type=media_type)


def _blocks(file: Any) -> Iterator[bytes]:
    with file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _image(found: Unreviewed, models: dict[str, LoggedModel]) -> ImageToReview:
    row, classes = found.row, models[found.row["bundle_version"]].classes
    likely = sorted(zip(row.get("probabilities") or (), classes, strict=False), reverse=True)[:10]
    taken = {name: row[name] for name in ImageToReview.model_fields if name in row}
    made = {"file": PurePosixPath(row[IMAGE_PATH]).name, "model": found.model, "scores": found.scores}
    made |= {"policy": json.loads(row["policy"]), "checks": dict(row["checks"] or ())}
    return ImageToReview(**(taken | made), name=found.name, likely={label: share for share, label in likely})
