"""``POST /predict`` and ``POST /models/{name}/predict``: images in, labels with uncertainty out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.answers import explanations_json, predictions_json
from app.errors import MalformedRequest
from app.problems import responses
from app.schemas import PredictResponse
from app.service import Service
from app.settings import SMALLEST_ALPHA
from app.uploads import UploadLimits, read_images

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_COUNT: Final = re.compile(r"\d{1,9}")
_PROBLEMS: Final = responses(400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)


class PlainRoute(APIRoute):
    """A documented route whose endpoint gets the request and gives the response, with nothing in between."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = respond


@dataclass(frozen=True, slots=True)
class Options:
    """Query parameters of a prediction."""

    top_k: int | None = None
    explain: bool = False
    alpha: float | None = None
    ambiguity_threshold: float | None = None


def _count(text: str) -> int | None:
    return int(text) if _COUNT.fullmatch(text) and int(text) >= 1 else None


def _flag(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text)


def _number(text: str) -> float | None:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


def _share(text: str) -> float | None:
    value = _number(text)
    return value if value is not None and SMALLEST_ALPHA <= value < 1.0 else None


def _threshold(text: str) -> float | None:
    value = _number(text)
    return value if value is not None and value >= 0.0 else None


_OPTIONS: Final[Mapping[str, tuple[Callable[[str], Any], str, dict[str, Any], str]]] = {
    "top_k": (
        _count,
        "an integer of 1 or more",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "Give the `top_k` most probable classes as `top` instead of all `probabilities`.",
    ),
    "explain": (_flag, "true or false", {"type": "boolean"}, "Add an `explanation` to each prediction."),
    "alpha": (
        _share,
        f"a number from {SMALLEST_ALPHA:g} to below 1",
        {"type": "number", "minimum": SMALLEST_ALPHA, "exclusiveMaximum": 1},
        "`is_ood` when p ≤ alpha, for this request; at least 1/(n + 1) with n calibration images, else 422.",
    ),
    "ambiguity_threshold": (
        _threshold,
        "a number of 0 or more",
        {"type": "number", "minimum": 0},
        "`abstain_ambiguous` above this predictive entropy (nats), for this request.",
    ),
}


def parse_options(query: bytes) -> Options:
    """Options of a query string.

    Raises:
        MalformedRequest: An unknown or repeated parameter, or a value out of range.
    """
    if not query:
        return Options()
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in _OPTIONS or name in values:
            wrong = "it twice" if name in values else repr(name)
            raise MalformedRequest(f"expected parameters {', '.join(_OPTIONS)} once each, got {wrong}")
        parse, expected, _, _ = _OPTIONS[name]
        values[name] = parse(text)
        if values[name] is None:
            raise MalformedRequest(f"parameter {name}: expected {expected}, got {text!r}; correct it")
    return Options(**values)


async def _predict(request: Request) -> Response:
    service: Service = request.app.state.service
    await service.guard(request)
    settings, registry = service.settings, service.registry
    name = request.path_params.get("name")
    registry.get(name)
    options = parse_options(request.scope["query_string"])
    limits = UploadLimits(settings.max_images_per_request, settings.max_fields, settings.upload_seconds)
    uploads = await read_images(request, limits)
    served = registry.get(name)
    policy = served.with_thresholds(options.alpha, options.ambiguity_threshold)
    answer = await served.engine.predict_encoded(
        uploads,
        deadline_s=settings.deadline_seconds,
        receive=request.receive,
        explain=options.explain,
    )
    verdict = served.judge(answer.rows, policy)
    served.record(verdict)
    predictions = predictions_json(verdict, served.classes, top_k=options.top_k)
    if options.explain:
        explanations = explanations_json(answer.explanation, verdict, served.classes)
        for prediction, explanation in zip(predictions, explanations, strict=True):
            prediction["explanation"] = explanation
    document = {
        "model": {"name": served.name, "version": served.version, "layer": served.layer},
        "policy": policy.to_json(),
        "predictions": predictions,
    }
    return Response(dump(document), media_type="application/json")


def dump(document: Any) -> bytes:
    """JSON bytes of a document that may hold numpy scalars and arrays."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY, default=_contiguous)


def _contiguous(value: Any) -> Any:
    return value.tolist()


_PARAMETERS: Final = [
    {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
    for name, (_, _, schema, text) in _OPTIONS.items()
]
_NAME_PARAMETER: Final = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "Model name; `/model` lists them.",
}
_BODY: Final = {
    "required": True,
    "description": "The images, in one of three forms.",
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["images"],
                "properties": {
                    "images": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "string", "format": "binary"},
                        "description": "JPEG, PNG, WebP, BMP, GIF (first frame) or TIFF files.",
                    }
                },
            }
        },
        "application/json": {"schema": {"$ref": "#/components/schemas/JsonImages"}},
        "image/*": {"schema": {"type": "string", "format": "binary"}},
    },
}


async def predict(request: Request) -> Response:
    """Labels, probabilities, entropy, log density, OOD p-value, decision and prediction set of each image."""
    return await _predict(request)


async def predict_with(request: Request) -> Response:
    """As `/predict`, with the named model."""
    return await _predict(request)


def add_routes(router: APIRouter) -> None:
    """Add both routes to ``router`` itself: an included router costs every request a second matching."""
    common: dict[str, Any] = {
        "methods": ["POST"],
        "tags": ["predict"],
        "response_model": PredictResponse,
        "responses": _PROBLEMS,
        "route_class_override": PlainRoute,
    }
    router.add_api_route(
        "/predict",
        predict,
        summary="Classify images with the default model",
        openapi_extra={"parameters": _PARAMETERS, "requestBody": _BODY},
        **common,
    )
    router.add_api_route(
        "/models/{name}/predict",
        predict_with,
        summary="Classify images with a model by name",
        openapi_extra={"parameters": [_NAME_PARAMETER, *_PARAMETERS], "requestBody": _BODY},
        **common,
    )
