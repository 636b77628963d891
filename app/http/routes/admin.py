"""``POST /admin/reload``: load bundles again and swap them in, with no request lost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from app.http.openapi import responses
from app.http.schemas import ReloadDocument, ReloadedModel
from app.service import service_of

router = APIRouter(prefix="/admin", tags=["admin"])


@router.post("/reload", summary="Reload bundles", responses=responses(400, 401, 403, 404, 409, 422, 503))
async def reload(
    request: Request,
    model: Annotated[str | None, Query(description="Only this model; without it all of them.")] = None,
) -> ReloadDocument:
    """Read, verify, build and warm up beside the old model, then swap.  A bad bundle changes nothing.

    Of several workers the one that answers has done so; then all are replaced, one after the other.
    """
    service = service_of(request)
    service.keys.check_admin(request.headers)
    changes = await service.reload(model)
    return ReloadDocument(
        reloaded=[ReloadedModel(name=name, previous_version=before, version=now) for name, before, now in changes]
    )
