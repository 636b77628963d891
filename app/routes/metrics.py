"""``/metrics`` for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.service import Service

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    summary="Metrics",
)
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    service: Service = request.app.state.service
    service.refresh()
    service.refresh_gpu()
    body, content_type = service.metrics.exposition()
    return Response(body, headers={"content-type": content_type})
