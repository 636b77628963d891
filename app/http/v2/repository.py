"""The protocol's model repository: list the models, and take them in and out of service.

Loading a model that is in service reads its bundle again, as ``POST /admin/reload`` does.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request

from app.errors import MalformedRequest
from app.http.v2.schemas import RepositoryModel, errors
from app.service import service_of, service_to_predict

_ERRORS: Final = errors(400, 403, 404, 409, 422, 500, 503)

router = APIRouter(prefix="/v2/repository", tags=["open inference protocol v2"], responses=errors(401, 415))


@router.post("/index", summary="Models of the repository")
async def index(request: Request) -> list[RepositoryModel]:
    """List every model, its version and whether it answers."""
    registry = service_to_predict(request).registry
    reasons = registry.reasons() | dict.fromkeys(registry.unloaded, "unloaded")
    versions = {served.name: served.model.version for served in registry.served}
    return [
        RepositoryModel(
            name=name,
            version=versions.get(name, ""),
            state="UNAVAILABLE" if name in reasons else "READY",
            reason=reasons.get(name, ""),
        )
        for name in registry.names
    ]


@router.post("/models/{name}/load", summary="Load a model", responses=_ERRORS)
async def load(request: Request, name: str) -> dict[str, str]:
    """Load and warm up the model's bundle, then swap it in; a bad bundle changes nothing."""
    service = service_of(request)
    service.keys.check_admin(request.headers)
    await service.reload(name)
    return {}


@router.post("/models/{name}/unload", summary="Unload a model", responses=_ERRORS)
async def unload(request: Request, name: str) -> dict[str, str]:
    """Take the model out of service; the requests that it has admitted are answered."""
    service = service_of(request)
    service.keys.check_admin(request.headers)
    if service.settings.workers > 1:
        raise MalformedRequest("a worker cannot unload a model for the others; serve with workers = 1")
    service.registry.unload(name)
    return {}
