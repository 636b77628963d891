"""``GET /feedback/images``: list the latest images that a model abstained from and that nobody has reviewed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from app.http.openapi import responses
from app.http.query import parse_query, query_parameters
from app.http.schemas import ClassNames, PredictedNumber, TaskName
from app.log.feedback import logged_image, to_review, wait_seconds
from app.service import service_of
from psc_core.log.images import MEDIA_TYPES
from psc_core.log.models import LoggedModel
from psc_core.log.schema import IMAGE_PATH
from psc_core.log.unreviewed import Unreviewed
from psc_core.tasks.answer import Document

MAX_IMAGES: Final = 50

_BLOCK_BYTES: Final = 1 << 16

_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cache-Control": "no-store",
}
"""The headers of a logged image: anyone may have sent it, so it must not run; and it may be erased, so it must not be
cached."""


class ImageToReview(Document):
    """A logged image that was not accepted and has no verdict."""

    request_id: str
    image_index: int
    image_sha256: str
    file: str = Field(description="The image's name at `/feedback/images/{file}`.")
    time: datetime = Field(description="The time of the answer.")
    model: str
    bundle_version: str
    decision: str
    label: str | None = Field(description="The most probable class; null for a regression.")
    policy: dict[str, Any] = Field(description="The thresholds behind the decision.")
    scores: dict[str, float] = Field(description="The scores of the answer, by name.")
    gates: dict[str, float] = Field(description="The p-value of each gate.")


class ReviewedModel(Document):
    """A model of the listed images, and the labels that they may get."""

    task: TaskName
    classes: ClassNames
    target: PredictedNumber


class ReviewDocument(Document):
    """Images for people to review."""

    images: list[ImageToReview] = Field(description="The images, the newest first.")
    models: dict[str, ReviewedModel] = Field(description="Their models, by `bundle_version`.")


class _ReviewQuery(BaseModel):
    limit: int = Field(default=12, ge=1, le=MAX_IMAGES, description="Maximum number of images.")


router = APIRouter(tags=["feedback"], responses=responses(401, 403, 429, 503, 504))


@router.get(
    "/feedback/images",
    summary="Images to review",
    responses=responses(400),
    openapi_extra={"parameters": query_parameters(_ReviewQuery)},
)
async def images(request: Request) -> ReviewDocument:
    """List the newest logged images (with `--log`) that were neither accepted nor reviewed.

    `POST /feedback` takes a verdict on them.
    """
    service = service_of(request)
    service.keys.check_feedback(request.headers)
    seconds = wait_seconds(service.settings.deadline_seconds)
    query = parse_query(_ReviewQuery, request)
    found, models = await service.search_log(lambda log: to_review(log, query.limit, seconds=seconds))
    return ReviewDocument(
        images=[_image(each) for each in found], models={version: _model(each) for version, each in models.items()}
    )


@router.get(
    "/feedback/images/{file}",
    summary="A logged image",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
        **responses(404),
    },
)
async def image(request: Request, file: str) -> StreamingResponse:
    """Return one of these images, with its bytes as received."""
    service = service_of(request)
    service.keys.check_feedback(request.headers)
    opened, size = await service.search_log(lambda log: logged_image(log, file))
    media_type = MEDIA_TYPES.get(file.rpartition(".")[2], "application/octet-stream")
    return StreamingResponse(_blocks(opened), headers={**_HEADERS, "Content-Length": str(size)}, media_type=media_type)


def _blocks(file: Any) -> Iterator[bytes]:
    with file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _image(found: Unreviewed) -> ImageToReview:
    row = found.row
    taken = {name: row[name] for name in ImageToReview.model_fields if name in row}
    return ImageToReview(
        **{
            **taken,
            "file": PurePosixPath(row[IMAGE_PATH]).name,
            "model": found.model,
            "policy": json.loads(row["policy"]),
            "scores": found.scores,
            "gates": dict(row["gates"] or ()),
        }
    )


def _model(model: LoggedModel) -> ReviewedModel:
    return ReviewedModel(task=model.task.name, classes=list(model.classes), target=model.task.number())
