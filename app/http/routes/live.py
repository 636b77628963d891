"""``/models/{name}/live`` and ``/models/{name}/examples``: a model's latest answers, and images to try."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from app.http.openapi import responses
from app.http.schemas import ExamplesDocument, RecentDocument
from app.service import Service, service_to_predict
from psc_core.bundle.io import TRY_FOLDER
from psc_core.images import SUFFIXES

MAX_FILES: Final = 12
MAX_FILE_BYTES: Final = 1 << 20
"""The maximum size of an image to try, bytes; larger files are not shown."""

router = APIRouter(tags=["model"], responses=responses(401, 404, 503))


@router.get("/models/{name}/live", summary="The last images of a model")
async def live(request: Request, name: str) -> RecentDocument:
    """Summarise this process's latest answers: the fraction of out-of-distribution images, drift, and the queue."""
    served = service_to_predict(request).registry.get(name)
    drift = served.recorder.drift
    return RecentDocument(
        images=drift.window_images,
        ood_fraction=drift.window_ood_rate,
        alpha=served.thresholds.policy.alpha,
        drift_active=drift.is_active,
        drift_alarms=drift.alarms,
        queued_images=served.engine.pending,
        queue_limit=served.recorder.queue_limit,
    )


@router.get(
    "/models/{name}/examples",
    summary="Images to try",
    description=f"List the image files in the folder `{TRY_FOLDER}` of the bundle, at most {MAX_FILES} of at most "
    f"{MAX_FILE_BYTES >> 20} MiB.",
)
async def examples(request: Request, name: str) -> ExamplesDocument:
    """List a model's images to try."""
    service = service_to_predict(request)
    service.registry.get(name)
    return ExamplesDocument(files=sorted(example_files(service, name)))


@router.get("/models/{name}/examples/{file}", summary="An image to try", response_class=FileResponse)
async def example(request: Request, name: str, file: str) -> FileResponse:
    """Return one of these images."""
    service = service_to_predict(request)
    service.registry.get(name)
    found = example_files(service, name).get(file)
    if found is None:
        raise HTTPException(404, f"model {name!r} has no such image to try")
    return FileResponse(found, headers={"X-Content-Type-Options": "nosniff"})


def example_files(service: Service, name: str) -> dict[str, Path]:
    """Return a model's images to try by file name; only regular files inside the bundle."""
    bundle = dict(service.settings.named_bundles).get(name)
    if bundle is None or not (bundle / TRY_FOLDER).is_dir():
        return {}
    root = bundle.resolve()
    files = [
        path
        for path in sorted((bundle / TRY_FOLDER).iterdir())
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and path.resolve().is_relative_to(root)
        and path.stat().st_size <= MAX_FILE_BYTES
    ]
    return {path.name: path for path in files[:MAX_FILES]}
