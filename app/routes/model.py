"""``/model`` and ``/models/{name}``: what is served and how it was calibrated."""

from __future__ import annotations

from typing import Final

import numpy as np
from fastapi import APIRouter, Request

from app.problems import responses
from app.registry import Served
from app.schemas import CalibrationDocument, Histogram, ModelDocument, PolicyDocument
from app.service import Service

_BINS: Final = 40

router = APIRouter(tags=["model"], responses=responses(401, 503))


def model_document(served: Served, names: tuple[str, ...]) -> ModelDocument:
    """The document of one served model."""
    model = served.model
    scores = model.calibration.scores.cpu().numpy().astype(np.float64)
    counts, edges = np.histogram(scores, bins=_BINS)
    threshold = model.calibration.ood_score_threshold(served.policy.alpha)
    return ModelDocument(
        name=served.name,
        version=served.version,
        layer=served.layer,
        predictions=model.predictions,
        epistemic_unit=model.epistemic_unit,
        device=str(model.device),
        classes=list(served.classes),
        input=model.preprocess.to_json(),
        policy=PolicyDocument(**served.policy._asdict()),
        calibration=CalibrationDocument(
            images=len(scores),
            ood_score_threshold=threshold,
            ood_score=Histogram(edges=edges.tolist(), counts=counts.tolist()),
        ),
        report=dict(model.report),
        models=list(names),
    )


@router.get("/model", summary="The default model")
async def default_model(request: Request) -> ModelDocument:
    """Manifest summary, thresholds and calibration histogram of the default model."""
    return await _describe(request, None)


@router.get("/models/{name}", summary="A model by name", responses=responses(404))
async def named_model(request: Request, name: str) -> ModelDocument:
    """As `/model`, of the named model."""
    return await _describe(request, name)


async def _describe(request: Request, name: str | None) -> ModelDocument:
    service: Service = request.app.state.service
    await service.guard(request)
    return model_document(service.registry.get(name), service.registry.names)
