"""``/healthz``: the process answers.  ``/readyz``: predictions are answered now."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.http.schemas import HealthDocument, ReadyDocument
from app.service import service_of

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Liveness")
async def healthz() -> HealthDocument:
    """Always 200 while the process answers at all."""
    return HealthDocument(status="ok")


@router.get(
    "/readyz",
    summary="Readiness",
    responses={503: {"model": ReadyDocument, "description": "Loading, warming up, draining or failed."}},
)
async def readyz(request: Request, response: Response) -> ReadyDocument:
    """200 when every model is loaded, its device checked and every batch shape warm; else 503 with reasons."""
    reasons = service_of(request).reasons()
    if reasons:
        response.status_code = 503
    return ReadyDocument(status="not ready" if reasons else "ready", reasons=reasons)
