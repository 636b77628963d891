"""``/metrics`` for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.service import service_of

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    summary="Metrics",
)
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    service = service_of(request)
    service.refresh_metrics()
    service.refresh_gpu_metrics()
    body, content_type = service.metrics.exposition()
    return Response(body, headers={"content-type": content_type})
