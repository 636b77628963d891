"""Describe in OpenAPI what FastAPI cannot know: problem documents, bodies that the routes read themselves, and HEAD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from fastapi import APIRouter, FastAPI

from app.errors import INTERNAL, TABLE
from app.http.problems import MEDIA_TYPE, ProblemDocument

# The request body of a prediction, for OpenAPI.
IMAGES_BODY: Final[dict[str, Any]] = {
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
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["images"],
                "additionalProperties": False,
                "properties": {
                    "images": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["b64"],
                            "additionalProperties": False,
                            "properties": {
                                "b64": {
                                    "type": "string",
                                    "contentEncoding": "base64",
                                    "pattern": r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
                                    "description": "Base64 of an image file, padded, without line breaks.",
                                }
                            },
                        },
                    }
                },
            }
        },
        "image/*": {"schema": {"type": "string", "format": "binary"}},
    },
}
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
_TITLES: Final = sorted({(status, title) for status, _, title in [*TABLE.values(), INTERNAL]})
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds to wait before a retry.", "schema": {"type": "integer", "minimum": 1}}
}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses=`` of a route that can answer with problems of these statuses."""
    schema = {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}
    return {
        status: {
            "description": ". ".join(title for of, title in _TITLES if of == status) + ".",
            "content": {MEDIA_TYPE: {"schema": schema}},
            **({"headers": _RETRY_AFTER} if status == 429 else {}),
        }
        for status in statuses
    }


def get_and_head(router: APIRouter | FastAPI, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Register an endpoint for GET, and outside the document for HEAD: some load balancers and monitors ask with it."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.get(path, **options)(endpoint)
        router.head(path, **{**options, "include_in_schema": False})(endpoint)
        return endpoint

    return register


class Application(FastAPI):
    """FastAPI with an OpenAPI document that has problems, and no 422, because invalid parameters are 400 here."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path in document["paths"].values():
            for operation in path.values():
                content = operation["responses"].get("422", {}).get("content", {})
                if "HTTPValidationError" in str(content):
                    del operation["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas[ProblemDocument.__name__] = ProblemDocument.model_json_schema()
        return document
