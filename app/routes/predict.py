"""``POST /predict`` and ``POST /models/{name}/predict``: images in, labels with uncertainty out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import parse_qsl

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from app.answers import Policy, explanations_json, predictions_json
from app.engine import Answer
from app.errors import MalformedRequest
from app.middleware.shortcuts import Shortcut
from app.problems import responses
from app.registry import Served
from app.schemas import PredictResponse
from app.service import Service
from app.settings import SMALLEST_ALPHA
from app.uploads import UploadLimits, read_images

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_COUNT: Final = re.compile(r"\d{1,9}")
_PROBLEMS: Final = responses(400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Options:
    """Query parameters of a prediction."""

    top_k: int | None = None
    explain: bool = False
    alpha: float | None = None
    ambiguity_threshold: float | None = None


_DEFAULTS: Final = Options()


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
        return _DEFAULTS
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


class Predict:
    """ASGI application: images in, the JSON answer out.

    Args:
        service: Whose models, settings and keys hold.
        name: Of the model; ``None``: the path parameter ``name``, or the default model.
    """

    def __init__(self, service: Service, name: str | None = None) -> None:
        self._service = service
        self._name = name
        settings = service.settings
        self._limits = UploadLimits(settings.max_images_per_request, settings.max_fields, settings.upload_seconds)
        self._deadline_s = settings.deadline_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        if service.keys.predict:
            await service.guard(Request(scope))
        name = self._name or scope.get("path_params", {}).get("name")
        served = service.registry.get(name)
        options = parse_options(scope["query_string"])
        uploads = await read_images(
            scope["headers"],
            receive,
            self._limits,
            before_waiting=lambda: served.engine.check_room(deadline_s=self._deadline_s),
        )
        served = service.registry.get(name)  # A reload may have swapped it meanwhile.
        policy = served.with_thresholds(options.alpha, options.ambiguity_threshold)
        answer = await served.engine.predict_encoded(
            uploads, deadline_s=self._deadline_s, receive=receive, explain=options.explain
        )
        predictions = served.predictions(answer) if options is _DEFAULTS else _make(served, answer, policy, options)
        served.record(answer.rows, policy)
        body = served.document(predictions, policy)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _make(served: Served, answer: Answer, policy: Policy, options: Options) -> list[bytes]:
    """Predictions as a request wants them."""
    verdict = served.judge(answer.rows, policy)
    explanations = explanations_json(answer.explanation, verdict, served.classes) if options.explain else None
    return predictions_json(answer.rows, verdict, served.labels, top_k=options.top_k, explanations=explanations)


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


async def predict() -> Response:
    """Labels, probabilities, entropy, log density, OOD p-value, decision and prediction set of each image."""
    raise NotImplementedError


async def predict_with() -> Response:
    """As `/predict`, with the named model."""
    raise NotImplementedError


def add_routes(router: APIRouter, service: Service) -> dict[str, Shortcut]:
    """Document and add both routes; their endpoints above only carry the description, :class:`Predict` answers.

    Returns:
        The paths of every model.
    """
    common: dict[str, Any] = {
        "methods": ["POST"],
        "tags": ["predict"],
        "response_model": PredictResponse,
        "responses": _PROBLEMS,
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
    default, named = cast(list[APIRoute], router.routes[-2:])
    default.app = named.app = Predict(service)
    paths = {f"/models/{name}/predict": Shortcut(named, Predict(service, name)) for name in service.registry.names}
    return {"/predict": Shortcut(default, Predict(service)), **paths}
