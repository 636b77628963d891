"""Open Inference Protocol v2 over REST, with the binary tensor data extension.

The same engine, limits, keys and thresholds as ``/predict``; errors are the protocol's ``{"error": "…"}``
with the statuses of ``app/errors.py``.  A request may set the parameter ``alpha`` for ``is_ood``; the
answer's parameters say which was used.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from app.engine import Answer
from app.errors import MalformedRequest, UnknownModel, UnsupportedMedia
from app.registry import Served
from app.service import Service
from app.settings import SMALLEST_ALPHA
from app.step import Images
from app.uploads import Upload, read_body
from app.v2_schemas import (
    INFER_BODY,
    INFER_PARAMETERS,
    ErrorDocument,
    InferResponse,
    LiveDocument,
    ModelMetadata,
    ModelReadyDocument,
    ReadyDocument,
    ServerMetadata,
    TensorMetadata,
)
from app.v2_tensors import (
    ENCODED_INPUT,
    RAW_INPUT,
    InferRequest,
    OutputTensor,
    build_response,
    images_of,
    parse_request,
)
from psc_core.model.decision import Verdict
from psc_core.version import __version__

HEADER: Final = "Inference-Header-Content-Length"
_INLINE_BYTES: Final = 256 * 1024
_OUTPUTS: Final = (
    "probabilities",
    "predictive_entropy",
    "log_density",
    "ood_score",
    "ood_p_value",
    "is_ood",
    "label",
    "class_index",
)

_Found = TypeVar("_Found")


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses=`` of a route that can answer with these error statuses."""
    return {status: {"model": ErrorDocument} for status in statuses}


_METADATA_ERRORS: Final = _errors(401, 404, 503)
_INFER_ERRORS: Final = _errors(400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)
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
    """Name, version and extensions."""
    return ServerMetadata(name="psc", version=__version__, extensions=["binary_tensor_data"])


@router.get("/health/live", summary="Server liveness")
async def live() -> LiveDocument:
    """Always 200 while the process answers at all."""
    return LiveDocument(live=True)


@router.get("/health/ready", summary="Server readiness", responses={503: {"model": ReadyDocument}})
async def ready(request: Request, response: Response) -> ReadyDocument:
    """200 when every model answers; else 503."""
    is_ready = not _service(request).registry.reasons()
    response.status_code = 200 if is_ready else 503
    return ReadyDocument(live=True, ready=is_ready)


@router.get("/models/{name}", response_model=ModelMetadata, responses=_METADATA_ERRORS, summary="Model metadata")
async def model_metadata(request: Request, name: str) -> Response:
    """Inputs and outputs of a model; the two inputs are alternatives."""
    return await _metadata(request, name, None)


@router.get(
    "/models/{name}/versions/{version}",
    response_model=ModelMetadata,
    responses=_METADATA_ERRORS,
    summary="Metadata of a model's version",
)
async def version_metadata(request: Request, name: str, version: str) -> Response:
    """As without a version; the version is the digest of the bundle in service."""
    return await _metadata(request, name, version)


@router.get(
    "/models/{name}/ready",
    response_model=ModelReadyDocument,
    responses={503: {"model": ModelReadyDocument}, **_errors(404)},
    summary="Model readiness",
)
async def model_ready(request: Request, name: str) -> Response:
    """200 when the model answers; else 503."""
    return _model_ready(request, name, None)


@router.get(
    "/models/{name}/versions/{version}/ready",
    response_model=ModelReadyDocument,
    responses={503: {"model": ModelReadyDocument}, **_errors(404)},
    summary="Readiness of a model's version",
)
async def version_ready(request: Request, name: str, version: str) -> Response:
    """As without a version."""
    return _model_ready(request, name, version)


@router.post("/models/{name}/infer", summary="Inference", **_INFER)
async def infer(request: Request, name: str) -> Response:
    """Images in, the wanted outputs out, as JSON or binary data."""
    return await _infer(request, name, None)


@router.post("/models/{name}/versions/{version}/infer", summary="Inference with a version", **_INFER)
async def version_infer(request: Request, name: str, version: str) -> Response:
    """As without a version."""
    return await _infer(request, name, version)


async def _metadata(request: Request, name: str, version: str | None) -> Response:
    service = _service(request)
    await service.guard(request)
    served = _served(service, name, version)
    shape = served.preprocess
    document = ModelMetadata(
        name=served.name,
        versions=[served.version],
        platform="pytorch_psc",
        inputs=[
            TensorMetadata(name=RAW_INPUT, datatype="UINT8", shape=[-1, shape.height, shape.width, shape.channels]),
            TensorMetadata(name=ENCODED_INPUT, datatype="BYTES", shape=[-1]),
        ],
        outputs=[
            TensorMetadata(
                name=output,
                datatype=_datatype(output),
                shape=[-1, len(served.classes)] if output == "probabilities" else [-1],
            )
            for output in _OUTPUTS
        ],
    )
    return _json(document.model_dump())


def _model_ready(request: Request, name: str, version: str | None) -> Response:
    registry = _service(request).registry
    reasons = registry.reasons()
    if version is not None and name not in reasons:
        _served(_service(request), name, version)
    if name not in registry.names:
        registry.get(name)
    is_ready = name not in reasons and "service" not in reasons
    return _json({"name": name, "ready": is_ready}, 200 if is_ready else 503)


async def _infer(request: Request, name: str, version: str | None) -> Response:
    service = _service(request)
    await service.guard(request)
    served = _served(service, name, version)
    body = await _read_body(request, service, served)
    header_length = request.headers.get(HEADER)
    wanted = await _read(len(body), parse_request, body, header_length, _OUTPUTS)
    most, images = service.settings.max_images_per_request, None
    while images is None or served is not _served(service, name, version):  # A reload may swap it at every await.
        served = _served(service, name, version)
        size = (served.preprocess.channels, served.preprocess.height, served.preprocess.width)
        images = await _read(len(body), partial(images_of, wanted.tensor, size, max_images=most))
    policy = served.with_thresholds(_alpha(wanted), None)
    answer = await _run(service, served, images, request)
    verdict = served.judge(answer.rows, policy)
    served.record(answer.rows, policy)
    binary = wanted.outputs or dict.fromkeys(_OUTPUTS, wanted.binary_output)
    head = {"model_name": served.name, "model_version": served.version}
    if wanted.id is not None:
        head["id"] = wanted.id
    tensors = [_output(output, verdict, served.classes) for output in binary]
    document, length = build_response({**head, "parameters": {"alpha": policy.alpha}}, tensors, binary)
    if length is None:
        return Response(document, media_type="application/json")
    return Response(document, media_type="application/octet-stream", headers={HEADER: str(length)})


async def _read(size: int, work: Callable[..., _Found], *arguments: Any) -> _Found:
    """``work(*arguments)``, on a thread where a body of ``size`` bytes would hold up the event loop."""
    return work(*arguments) if size <= _INLINE_BYTES else await asyncio.to_thread(work, *arguments)


async def _run(service: Service, served: Served, images: Images | list[bytes], request: Request) -> Answer:
    seconds = service.settings.deadline_seconds
    if isinstance(images, np.ndarray):
        return await served.engine.predict_arrays(images, deadline_s=seconds, receive=request.receive)
    uploads = [Upload(data) for data in images]
    return await served.engine.predict_encoded(uploads, deadline_s=seconds, receive=request.receive)


async def _read_body(request: Request, service: Service, served: Served) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMedia(f"expected a body that is not compressed, got {encoding!r}; send it as it is")
    deadline_s = service.settings.deadline_seconds
    return await read_body(
        request.receive,
        service.settings.upload_seconds,
        before_waiting=lambda: served.engine.check_room(deadline_s=deadline_s),
    )


def _output(name: str, verdict: Verdict, classes: tuple[str, ...]) -> OutputTensor:
    count = len(verdict.class_index)
    if name == "label":
        return OutputTensor(name, "BYTES", (count,), [classes[i] for i in verdict.class_index.tolist()])
    values = getattr(verdict, name)
    return OutputTensor(name, _datatype(name), values.shape, values)


def _datatype(output: str) -> Any:
    return {"is_ood": "BOOL", "label": "BYTES", "class_index": "INT64"}.get(output, "FP32")


def _alpha(wanted: InferRequest) -> float | None:
    alpha = wanted.parameters.get("alpha")
    if alpha is None:
        return None
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not SMALLEST_ALPHA <= alpha < 1.0:
        raise MalformedRequest(
            f"parameter 'alpha': expected a number from {SMALLEST_ALPHA:g} to below 1, got {reprlib.repr(alpha)}"
        )
    return float(alpha)


def _served(service: Service, name: str, version: str | None) -> Served:
    served = service.registry.get(name)
    if version is not None and version != served.version:
        raise UnknownModel(f"model {name!r}: expected version {served.version!r}, got {version!r}; see /v2")
    return served


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(document: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")
