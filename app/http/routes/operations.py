"""The routes for operators and their machines: liveness, readiness, metrics and reload."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from app.http.openapi import get_and_head, responses
from app.http.query import parse_query, query_parameters
from app.http.schemas import HealthDocument, ReadyDocument, ReloadDocument, ReloadedModel
from app.service import service_of


class _ReloadQuery(BaseModel):
    model: str | None = Field(default=None, description="The model to reload; by default all.")


router = APIRouter()


@get_and_head(router, "/healthz", summary="Liveness", tags=["health"])
async def healthz() -> HealthDocument:
    """Answer 200 while the process is alive."""
    return HealthDocument(status="ok")


@get_and_head(
    router,
    "/readyz",
    summary="Readiness",
    tags=["health"],
    responses={503: {"model": ReadyDocument, "description": "Loading, warming up, draining or failed."}},
)
async def readyz(request: Request, response: Response) -> ReadyDocument:
    """Answer 200 if every model is loaded, checked on its device and warmed up; else 503 with the reasons."""
    reasons = service_of(request).reasons()
    if reasons:
        response.status_code = 503
    return ReadyDocument(status="not ready" if reasons else "ready", reasons=reasons)


@get_and_head(
    router,
    "/metrics",
    summary="Metrics",
    tags=["metrics"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format."""
    service = service_of(request)
    service.refresh_metrics()
    service.refresh_gpu_metrics()
    body, content_type = service.metrics.exposition()
    return Response(body, headers={"content-type": content_type})


@router.post(
    "/admin/reload",
    summary="Reload bundles",
    tags=["admin"],
    responses=responses(400, 401, 403, 404, 409, 415, 422, 500, 503),
    openapi_extra={"parameters": query_parameters(_ReloadQuery)},
)
async def reload(request: Request) -> ReloadDocument:
    """Load and warm up the new model beside the old one, then swap them; a bad bundle changes nothing.

    With several workers, the one that answers has reloaded by then; after that, all are replaced one by one.
    """
    service = service_of(request)
    service.keys.check_admin(request.headers)
    changes = await service.reload(parse_query(_ReloadQuery, request).model)
    return ReloadDocument(
        reloaded=[ReloadedModel(name=name, previous_version=before, version=now) for name, before, now in changes]
    )
