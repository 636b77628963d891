"""The Open Inference Protocol v2 over REST, with the binary tensor data extension.

Engine, limits, keys and thresholds are those of ``/predict``; errors are the protocol's ``{"error": "…"}`` with the
statuses of :mod:`app.http.problems`.  A request may set the parameter ``alpha`` for ``is_ood``; the answer's
parameters give the alpha that was used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from app.http.openapi import get_and_head
from app.http.uploads import parse, read_body, read_json_body
from app.http.v2.inference import Received, find_model, output_names
from app.http.v2.inference import infer as infer_images
from app.http.v2.schemas import (
    HEADER,
    INFER_BODY,
    INFER_PARAMETERS,
    InferResponse,
    ModelMetadata,
    ModelReadyDocument,
    ServerLiveDocument,
    ServerMetadata,
    ServerReadyDocument,
    TensorMetadata,
    errors,
)
from app.http.v2.tensors import build_response, parse_request
from app.models.served import ServedModel
from app.service import Service, service_of, service_to_predict
from psc_core.maps.layer_map import LayerMap
from psc_core.model.pipeline import MAP
from psc_core.version import __version__

_METADATA_ERRORS: Final = errors(401, 404, 503)
_INFER_ERRORS: Final = errors(400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)
_INFER: Final[Mapping[str, Any]] = {
    "response_model": InferResponse,
    "responses": {
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        **_INFER_ERRORS,
    },
    "openapi_extra": {"requestBody": INFER_BODY, "parameters": INFER_PARAMETERS},
}

router = APIRouter(prefix="/v2", tags=["open inference protocol v2"])


@router.get("", summary="Server metadata")
async def server_metadata() -> ServerMetadata:
    """Return the server's name, version and extensions."""
    return ServerMetadata(name="psc", version=__version__, extensions=["binary_tensor_data", "model_repository"])


@get_and_head(router, "/health/live", summary="Server liveness")
async def live() -> ServerLiveDocument:
    """Answer 200 while the process is alive."""
    return ServerLiveDocument(live=True)


@get_and_head(router, "/health/ready", summary="Server readiness", responses={503: {"model": ServerReadyDocument}})
async def ready(request: Request, response: Response) -> ServerReadyDocument:
    """Answer 200 if every model is ready; else 503."""
    is_ready = not service_of(request).reasons()
    response.status_code = 200 if is_ready else 503
    return ServerReadyDocument(live=True, ready=is_ready)


@router.get("/models/{name}", response_model=ModelMetadata, responses=_METADATA_ERRORS, summary="Model metadata")
async def model_metadata(request: Request, name: str) -> ModelMetadata:
    """Describe a model's inputs and outputs; a request has one of the two inputs."""
    return metadata_of(find_model(service_to_predict(request), name, None))


@router.get(
    "/models/{name}/versions/{version}",
    response_model=ModelMetadata,
    responses=_METADATA_ERRORS,
    summary="Metadata of a model's version",
)
async def version_metadata(request: Request, name: str, version: str) -> ModelMetadata:
    """Describe a model if this version, the digest of its bundle, is in service."""
    return metadata_of(find_model(service_to_predict(request), name, version))


@get_and_head(
    router,
    "/models/{name}/ready",
    response_model=ModelReadyDocument,
    responses={503: {"model": ModelReadyDocument}, **errors(404)},
    summary="Model readiness",
)
async def model_ready(request: Request, response: Response, name: str) -> ModelReadyDocument:
    """Answer 200 if the model is ready; else 503."""
    return _readiness(request, response, name, None)


@get_and_head(
    router,
    "/models/{name}/versions/{version}/ready",
    response_model=ModelReadyDocument,
    responses={503: {"model": ModelReadyDocument}, **errors(404)},
    summary="Readiness of a model's version",
)
async def version_ready(request: Request, response: Response, name: str, version: str) -> ModelReadyDocument:
    """Answer 200 if this version of the model is ready; else 503."""
    return _readiness(request, response, name, version)


@router.post("/models/{name}/infer", summary="Inference", **_INFER)
async def infer(request: Request, name: str) -> Response:
    """Run inference on images and return the wanted outputs, as JSON or binary data."""
    return await _infer(request, name, None)


@router.post("/models/{name}/versions/{version}/infer", summary="Inference with a version", **_INFER)
async def version_infer(request: Request, name: str, version: str) -> Response:
    """Run inference with this version of the model."""
    return await _infer(request, name, version)


def metadata_of(served: ServedModel) -> ModelMetadata:
    """Return the description of a model's inputs and outputs."""
    model, preprocess = served.model, served.model.preprocess
    pixels = [-1, preprocess.height, preprocess.width, preprocess.channels]
    return ModelMetadata(
        name=served.name,
        versions=[model.version],
        platform="pytorch_psc",
        inputs=[
            TensorMetadata(name="images", datatype="UINT8", shape=pixels),
            TensorMetadata(name="encoded_images", datatype="BYTES", shape=[-1]),
        ],
        outputs=[
            TensorMetadata(
                name=name,
                datatype=served.task.tensors[name],
                shape=[-1, *served.task.tensor_shape(name, model.classes, model.gates)],
            )
            for name in output_names(served)
        ]
        + _map_outputs(model.pipeline.map),
    )


def _map_outputs(layer_map: LayerMap | None) -> list[TensorMetadata]:
    """Describe the map, which the answer has only if the request names it."""
    if layer_map is None:
        return []
    return [TensorMetadata(name=MAP, datatype="UINT8", shape=[-1, layer_map.grid.rows, layer_map.grid.columns])]


def is_model_ready(service: Service, name: str, version: str | None) -> bool:
    """Return whether a model is ready.

    Raises:
        UnknownModel: If there is no model of this name and version.
    """
    if name in {*service.registry.unloaded, *service.registry.reasons()}:
        return False
    find_model(service, name, version)
    return "service" not in service.reasons()


def _readiness(request: Request, response: Response, name: str, version: str | None) -> ModelReadyDocument:
    is_ready = is_model_ready(service_of(request), name, version)
    response.status_code = 200 if is_ready else 503
    return ModelReadyDocument(name=name, ready=is_ready)


async def _infer(request: Request, name: str, version: str | None) -> Response:
    service = service_to_predict(request)
    find_model(service, name, version).engine.check_room()
    of_head = request.headers.get(HEADER)
    read = read_json_body if of_head is None else read_body
    body = await read(request, service.settings.upload_seconds)
    wanted, binary = await parse(service.parser, body, parse_request, body, of_head)
    answer = await infer_images(service, name, version, Received(wanted, binary, body), request.receive)
    head: dict[str, Any] = {"model_name": answer.served.name, "model_version": answer.served.model.version}
    head["parameters"] = {"alpha": answer.alpha}
    if wanted.id is not None:
        head["id"] = wanted.id
    document, length = build_response(head, answer.tensors, answer.as_binary)
    if length is None:
        return Response(document, media_type="application/json")
    return Response(document, media_type="application/octet-stream", headers={HEADER: str(length)})
