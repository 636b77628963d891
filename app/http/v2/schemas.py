"""Documents of the Open Inference Protocol v2, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field


class Document(BaseModel):
    """Immutable, with the declared members only."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ErrorDocument(Document):
    """Why a request failed."""

    error: str


class ServerMetadata(Document):
    """What serves."""

    name: str
    version: str
    extensions: list[str]


class LiveDocument(Document):
    """The process answers."""

    live: bool


class ReadyDocument(Document):
    """Whether every model answers."""

    live: bool
    ready: bool


class ModelReadyDocument(Document):
    """Whether one model answers."""

    name: str
    ready: bool


class TensorMetadata(Document):
    """A tensor; −1 stands for a size that varies."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Document):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata] = Field(description="Alternatives: a request has exactly one of them.")
    outputs: list[TensorMetadata]


class InferOutput(Document):
    """An output; ``data`` is left out where binary data follows the document."""

    name: str
    datatype: Literal["FP32", "INT64", "BOOL", "BYTES"]
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(Document):
    """Answer to an inference request."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any] = Field(description="`alpha`: the false-alarm rate behind `is_ood`.")
    outputs: list[InferOutput]


_PARAMETERS: Final = {"type": "object", "additionalProperties": True}
_INFER_REQUEST: Final = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {
            **_PARAMETERS,
            "properties": {
                "alpha": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "exclusiveMaximum": 1,
                    "description": "`is_ood` when p ≤ alpha, for this request.",
                },
                "binary_data_output": {"type": "boolean"},
            },
        },
        "inputs": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "shape", "datatype"],
                "properties": {
                    "name": {"enum": ["images", "encoded_images"]},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "datatype": {"enum": ["UINT8", "BYTES"]},
                    "parameters": {
                        **_PARAMETERS,
                        "properties": {
                            "binary_data_size": {"type": "integer", "minimum": 0},
                            "layout": {"enum": ["NHWC", "NCHW"]},
                        },
                    },
                    "data": {"type": "array", "items": {}},
                },
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "parameters": {**_PARAMETERS, "properties": {"binary_data": {"type": "boolean"}}},
                },
            },
        },
    },
}

INFER_BODY: Final = {
    "required": True,
    "description": "`images`: UINT8 of the network's own size, NHWC or NCHW. `encoded_images`: BYTES, image "
    "files (base64 in JSON).",
    "content": {
        "application/json": {"schema": _INFER_REQUEST},
        "application/octet-stream": {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "The JSON object, then binary data of its tensors.",
            }
        },
    },
}
"""Request body of an inference request."""

INFER_PARAMETERS: Final = [
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1},
        "description": "Length of the JSON object where binary data follows it, bytes.",
    }
]
"""Header of the binary tensor data extension."""
