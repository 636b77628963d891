"""``POST /predict`` and ``POST /models/{name}/predict``: answer images with predictions and their uncertainty."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Union

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import create_model

from app.errors import MalformedRequest, responses
from app.http.body import IMAGES_BODY, has_disconnected, parse_query, query_parameters, read_images
from app.inference.batcher import RequestMode
from app.inference.decoder import EncodedImage
from app.models import Predicted, ServedModel, explain
from app.service import Service, service_to
from psc_core.answers import BasePolicy, PredictQuery
from psc_core.tasks import TASKS

# The parameters of all tasks, any of which may be asked.
QUERY: Final[type[PredictQuery]] = create_model(
    "PredictQuery", __base__=tuple(task.query_type for task in TASKS.values())
)
_ROUTE: Final[dict[str, Any]] = {
    "response_model": Union[*(task.response_type for task in TASKS.values())],
    "responses": responses(400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504),
    "openapi_extra": {"requestBody": IMAGES_BODY, "parameters": query_parameters(QUERY)},
}
router = APIRouter(tags=["predict"])


@router.post("/predict", summary="Predict with the default model", **_ROUTE)
async def predict(request: Request) -> Response:
    """Return each image's label, probabilities, entropy, log density, OOD p-value, decision and prediction set.

    A regression returns a number, its deviations and an interval in place of label, probabilities, entropy and set.
    """
    return await _predict(request, None)


@router.post("/models/{name}/predict", summary="Predict with a model by name", **_ROUTE)
async def predict_with(request: Request, name: str) -> Response:
    """Predict with the named model, as `/predict` does."""
    return await _predict(request, name)


async def _predict(request: Request, name: str | None) -> Response:
    service = service_to("predict", request)

    async def read(served: ServedModel, mode: RequestMode) -> Sequence[EncodedImage]:
        served.engine.check_room(mode)
        return await read_images(request, service.settings, service.parser)

    body = await predict_images(
        service,
        name,
        parse_query(QUERY, request).model_dump(exclude_none=True),
        read,
        partial(has_disconnected, request.receive),
    )
    return Response(body, media_type="application/json")


async def predict_images(
    service: Service,
    name: str | None,
    query: Mapping[str, Any],
    read: Callable[[ServedModel, RequestMode], Awaitable[Sequence[EncodedImage]]],
    disconnected: Callable[[], bool],
) -> bytes:
    """Return the answer to a request with these parameters, by name, whose images ``read`` reads."""
    registry, is_explained = service.registry, query["explain"]
    if query["map"] and not is_explained:
        raise MalformedRequest("a map is part of an explanation; ask for both with explain=true&map=true")
    mode = RequestMode.PREDICT
    if is_explained:
        mode = RequestMode.EXPLAIN_WITH_MAP if query["map"] else RequestMode.EXPLAIN
    served = registry.get(name)
    policy, options = _split_query(served, query, mode)
    images = await read(served, mode)
    before, served = served, registry.get(name)
    if served is not before:  # A reload has swapped the model while the body arrived.
        policy, options = _split_query(served, query, mode)
    monitor = query["monitor"]
    predicted = await served.predict(images, policy, disconnected=disconnected, mode=mode, monitor=monitor)
    return predict_response(served, policy, predicted, **options)


def _split_query(served: ServedModel, query: Mapping[str, Any], mode: RequestMode) -> tuple[BasePolicy, dict[str, int]]:
    """Return the policy of a request and the options of its task's answers; refuse what the model does not have."""
    task = served.model.task
    if unknown := sorted(query.keys() - task.query_type.model_fields):
        raise MalformedRequest(f"model {served.name!r} is a {task.noun}, which has no {unknown[0]}; leave it out")
    served.check_map(mode)
    changes = {name: value for name, value in query.items() if name in task.policy_type.model_fields}
    options = {name: value for name, value in query.items() if name not in {*changes, *PredictQuery.model_fields}}
    return served.policy_with(**changes), options


def predict_response(served: ServedModel, policy: BasePolicy, predicted: Predicted, **options: int) -> bytes:
    """Return the answer as JSON; its schema is the ``response_type`` of the model's task.

    orjson gets numpy's float32 values, which it prints with the fewest digits that tell them from their neighbours; as
    Python floats they would have seventeen.
    """
    model, (outputs, decisions, explanation) = served.model, predicted
    predictions = decisions.documents(outputs, model.classes, **options)
    if explanation:
        for prediction, document in zip(predictions, explain(model, predicted, policy.alpha), strict=True):
            prediction["explanation"] = document
    document = {**served.identity, "policy": policy.model_dump(), "predictions": predictions}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
