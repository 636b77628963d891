"""What tests of the HTTP interface check in answers."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from app.errors import ProblemDocument
from psc_core.answers import CLASSIFICATION_SCORES, ClassificationResponse
from psc_core.tasks.base import Outputs
from tests.app.fakes import CLASSES, outputs_of, pixels, png
from tests.app.support import Running, until


def check_problem(response: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    ProblemDocument.model_validate(document)
    assert document["type"] == f"urn:psc:problem:{slug}"
    assert document["status"] == status
    return document


def check_predictions(response: httpx.Response, values: list[int]) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    document = ClassificationResponse.model_validate_json(response.content)
    assert len(document.predictions) == len(values)
    images = torch.from_numpy(np.stack([pixels(value)[None] for value in values]))
    outputs = Outputs(outputs_of(images).numpy(), CLASSIFICATION_SCORES, ())
    for k, prediction in enumerate(document.predictions):
        probabilities = outputs.probabilities[k]
        assert prediction.class_index == int(probabilities.argmax())
        assert prediction.label == CLASSES[prediction.class_index]
        assert prediction.confidence == pytest.approx(probabilities.max(), abs=1e-6)
        assert prediction.predictive_entropy == pytest.approx(outputs["predictive_entropy"][k], abs=1e-6)
        assert prediction.ood_score == pytest.approx(outputs["ood_score"][k], abs=1e-6)
        if prediction.probabilities is not None:
            assert prediction.probabilities == pytest.approx(probabilities.tolist(), abs=1e-6)
        assert prediction.label in prediction.prediction_set
    predictions: list[dict[str, Any]] = response.json()["predictions"]
    return predictions


async def hold(app: Running, images: int = 1) -> asyncio.Task[httpx.Response]:
    app.model.pipeline.check.clear()
    app.model.pipeline.sizes.clear()
    request = app.client.post("/predict", files=[("images", ("a.png", png(5)))] * images)
    task = asyncio.create_task(request)
    await until(lambda: app.model.pipeline.sizes and app.pending == max(0, images - 8))
    return task
