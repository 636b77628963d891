"""What routes ask for: the service, and that the caller may use it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from app.errors import MalformedRequest
from app.service import Service


async def get_service(request: Request) -> Service:
    """The service of the application."""
    service: Service = request.app.state.service
    return service


async def get_service_to_predict(request: Request) -> Service:
    """The service, for a caller who may predict.

    Raises:
        Unauthorized: No key, or one that is not known.
    """
    service = await get_service(request)
    service.keys.check_predict(request.headers)
    return service


async def get_service_to_administer(request: Request) -> Service:
    """The service, for a caller who may administer.

    Raises:
        Forbidden: No admin key is configured.
        Unauthorized: No key, or not an admin key.
    """
    service = await get_service(request)
    service.keys.check_admin(request.headers)
    return service


async def refuse_repeated_parameters(request: Request) -> None:
    """Refuse a query parameter that is given twice: which of the two counts would be a guess.

    Raises:
        MalformedRequest: One is.
    """
    names = [name for name, _ in request.query_params.multi_items()]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise MalformedRequest(f"parameter {repeated[0]!r} is given twice; give it once")


AnyService = Annotated[Service, Depends(get_service)]
PredictService = Annotated[Service, Depends(get_service_to_predict)]
AdminService = Annotated[Service, Depends(get_service_to_administer)]
