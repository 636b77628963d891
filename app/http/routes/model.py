"""``/model`` and ``/models/{name}``: describe a served model and its calibration."""

from __future__ import annotations

from typing import Final

import numpy as np
from fastapi import APIRouter, Request

from app.http.openapi import get_and_head, responses
from app.http.schemas import CalibrationDocument, Histogram, ModelDocument
from app.service import Service, service_to_predict

_BINS: Final = 40

router = APIRouter(tags=["model"], responses=responses(401, 503))


@get_and_head(router, "/model", summary="The default model")
async def default_model(request: Request) -> ModelDocument:
    """Summarise the default model's manifest, thresholds and calibration."""
    return model_document(service_to_predict(request), None)


@get_and_head(router, "/models/{name}", summary="A model by name", responses=responses(404))
async def named_model(request: Request, name: str) -> ModelDocument:
    """Describe the named model, as `/model` does."""
    return model_document(service_to_predict(request), name)


def model_document(service: Service, name: str | None) -> ModelDocument:
    """Return the document that describes a served model, by default the default one."""
    served = service.registry.get(name)
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
        models=list(service.registry.names),
        feedback=service.log is not None,
    )
