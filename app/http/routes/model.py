"""``/model`` and ``/models/{name}``: describe a served model and its calibration."""

from __future__ import annotations

from typing import Final

import numpy as np
from fastapi import APIRouter, Request

from app.http.openapi import get_and_head, responses
from app.http.schemas import CalibrationDocument, Histogram, ModelDocument
from app.models.served import ServedModel
from app.service import service_to_predict

_BINS: Final = 40

router = APIRouter(tags=["model"], responses=responses(401, 503))


@get_and_head(router, "/model", summary="The default model")
async def default_model(request: Request) -> ModelDocument:
    """Summarise the default model's manifest, thresholds and calibration."""
    registry = service_to_predict(request).registry
    return model_document(registry.get(), registry.names)


@get_and_head(router, "/models/{name}", summary="A model by name", responses=responses(404))
async def named_model(request: Request, name: str) -> ModelDocument:
    """Describe the named model, as `/model` does."""
    registry = service_to_predict(request).registry
    return model_document(registry.get(name), registry.names)


def model_document(served: ServedModel, names: tuple[str, ...]) -> ModelDocument:
    """Return the document that describes a served model."""
    model = served.model
    scores = model.calibration.ood_scores.cpu().numpy().astype(np.float64)
    counts, edges = np.histogram(scores, bins=_BINS)
    return ModelDocument(
        name=served.name,
        version=model.version,
        layer=model.layer,
        predictions=model.predictions,
        task=model.task.name,
        epistemic_unit=model.epistemic_unit,
        gates=list(model.gates),
        device=str(model.device),
        backend=served.backend,
        target=model.task.number(),
        classes=list(model.classes),
        input=model.preprocess.to_json(),
        policy=served.thresholds.policy,
        notes=[served.headline, *served.thresholds.policy.notes(model.classes)],
        calibration=CalibrationDocument(
            images=len(scores),
            ood_score_threshold=model.calibration.ood_score_threshold(served.thresholds.policy.alpha),
            ood_score=Histogram(edges=edges.tolist(), counts=counts.tolist()),
            entropy_quantiles=model.calibration.entropy_quantiles(),
        ),
        report=dict(model.report),
        models=list(names),
    )
