"""``POST /feedback``: write a person's verdict on an image to the labels of the prediction log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.errors import MalformedRequest
from app.http.json_body import load_json
from app.http.openapi import responses
from app.http.uploads import parse, read_json_body
from app.log.feedback import add_verdict, wait_seconds
from app.service import service_of
from psc_core.errors import fault
from psc_core.log.labels import LABEL, Label, Verdict
from psc_core.tasks.answer import Document


class Feedback(BaseModel):
    """A verdict on one image of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request_id: str = Field(
        min_length=1, max_length=100, description="The answer's header `traceresponse`, or its part `TRACE-SPAN`."
    )
    image_index: int = Field(default=0, ge=0, lt=1 << 31, description="Position of the image in the request, from 0.")
    image_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the file that was sent; checked if given."
    )
    verdict: Verdict = Field(default=LABEL)
    label: str | int | float | None = Field(
        default=None, description="The true class or number; required with the verdict `label`."
    )
    source: str = Field(default="feedback", min_length=1, max_length=200, description="The origin of the verdict.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.label is None) == (self.verdict == LABEL):
            raise ValueError("expected a label with the verdict label, and no label with other verdicts")
        return self

    def to_label(self) -> Label:
        """Return the verdict as a label of the log, without checking it against a row."""
        parts = self.request_id.split("-")
        name = "-".join(parts[1:3]) if len(parts) == 4 else self.request_id
        text = None if self.label is None else str(self.label)
        return Label(name, self.image_index, self.image_sha256, self.verdict, text, self.source, datetime.now(UTC))


class FeedbackDocument(Document):
    """A verdict as it was written to the log."""

    request_id: str
    image_index: int
    image_sha256: str | None
    verdict: str
    label: str | None


_BODY: Final = {"required": True, "content": {"application/json": {"schema": Feedback.model_json_schema()}}}

router = APIRouter(tags=["feedback"])


@router.post(
    "/feedback",
    summary="Say what an image shows",
    responses=responses(400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503, 504),
    openapi_extra={"requestBody": _BODY},
)
async def feedback(request: Request) -> FeedbackDocument:
    """Add a person's verdict on an image to the prediction log (with `--log`); the last verdict counts."""
    service = service_of(request)
    service.keys.check_feedback(request.headers)
    body = await read_json_body(request, service.settings.upload_seconds)
    try:
        given = Feedback.model_validate(await parse(service.parser, body, load_json, body))
    except ValidationError as error:
        raise MalformedRequest(fault(error.errors(include_input=False, include_url=False)[0], "member")) from error
    seconds = wait_seconds(service.settings.deadline_seconds)
    label = await service.search_log(lambda log: add_verdict(log, given.to_label(), seconds=seconds))
    service.metrics.psc_feedback_total.labels(verdict=label.verdict).inc()
    return FeedbackDocument(**{name: getattr(label, name) for name in FeedbackDocument.model_fields})
