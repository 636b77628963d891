"""Documents of the Open Inference Protocol v2, as the OpenAPI document describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from app.tasks.base import Datatype, tensor_names
from psc_core.model.pipeline import MAP
from psc_core.tasks.answer import Document
from psc_core.tasks.policy import Alpha

MAX_DIMENSIONS: Final = 8
"""Largest number of dimensions of an input; the first fault ends the check, as an error for each would be slow."""

_NAMES: Final = (*tensor_names(), MAP)


class ErrorDocument(Document):
    """The reason why a request failed."""

    error: str


class ServerMetadata(Document):
    """The server and what it supports."""

    name: str
    version: str
    extensions: list[str]


class ServerLiveDocument(Document):
    """The process answers."""

    live: bool


class ServerReadyDocument(Document):
    """The readiness of all models together."""

    live: bool
    ready: bool


class ModelReadyDocument(Document):
    """The readiness of one model."""

    name: str
    ready: bool


class RepositoryModel(Document):
    """A model of the repository."""

    name: str
    version: str = Field(description="Empty while it is not in service.")
    state: Literal["READY", "UNAVAILABLE"]
    reason: str = Field(description="Why it is not available.")


class TensorMetadata(Document):
    """A tensor; −1 stands for a size that varies."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Document):
    """The inputs that a model takes and the outputs that it gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata] = Field(description="Alternatives: a request has exactly one of them.")
    outputs: list[TensorMetadata]


class InferOutput(Document):
    """An output; ``data`` is left out where binary data follows the document."""

    name: str
    datatype: Datatype
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


_OutputName = Literal[_NAMES]  # type: ignore[valid-type]


class RequestModel(BaseModel):
    """Base of a request's parts: members and parameters that are not declared are ignored, as the protocol asks."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


def _reject(value: Any) -> None:
    if value is not None:
        raise ValueError("not supported by this server; leave it out")


_Unsupported = Annotated[None, BeforeValidator(_reject), Field(description="Not supported.")]


class _TensorParameters(RequestModel):
    """Parameters of a tensor; those that this server does not offer are refused rather than ignored."""

    shared_memory_region: _Unsupported = None
    classification: _Unsupported = None


class InputParameters(_TensorParameters):
    """Parameters of an input."""

    binary_data_size: int | None = Field(default=None, ge=0, description="Bytes of its binary data.")
    layout: Literal["NHWC", "NCHW"] | None = Field(default=None, description="Unset: the one that the shape fits.")


class InputTensor(RequestModel):
    """An input: JSON ``data``, or binary data of the size that its parameters give."""

    name: Literal["images", "encoded_images"]
    datatype: Literal["UINT8", "BYTES"]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_DIMENSIONS), FailFast()]
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.data is None) == (self.parameters.binary_data_size is None):
            raise ValueError("give either data or binary_data_size")
        expected = "UINT8" if self.name == "images" else "BYTES"
        if self.datatype != expected:
            raise ValueError(f"expected datatype {expected} for {self.name}, got {self.datatype}")
        return self


class OutputParameters(_TensorParameters):
    """Parameters of a wanted output."""

    binary_data: bool | None = Field(default=None, description="Unset: as `binary_data_output` of the request.")


class WantedOutput(RequestModel):
    """An output that the answer should have."""

    name: _OutputName
    parameters: OutputParameters = OutputParameters()


class RequestParameters(RequestModel):
    """Parameters of a request."""

    alpha: Alpha | None = Field(default=None, description="`is_ood` when p ≤ alpha, for this request.")
    monitor: bool = Field(default=True, description="`false` keeps the images out of drift and metrics of scores.")
    binary_data_output: bool = Field(
        default=False, description="Give outputs as binary data unless they say otherwise."
    )


class InferRequest(RequestModel):
    """An inference request; without ``outputs`` all are given but ``map``."""

    id: str | None = None
    parameters: RequestParameters = RequestParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1), FailFast()]
    outputs: Annotated[list[WantedOutput], Field(max_length=len(_NAMES)), FailFast()] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({output.name for output in self.outputs}) < len(self.outputs):
            raise ValueError("name each output once")
        return self

    def binary_outputs(self, available: Sequence[str]) -> dict[str, bool]:
        """The wanted outputs, or all available ones, in order, to whether each goes as binary data."""
        default = self.parameters.binary_data_output
        if not self.outputs:
            return dict.fromkeys(available, default)
        given = {output.name: output.parameters.binary_data for output in self.outputs}
        return {name: default if binary is None else binary for name, binary in given.items()}


def _inline(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model with its parts in place of references."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(parts[value["$ref"].rpartition("/")[2]])
            return {key: resolve(item) for key, item in value.items() if key != "default"}
        return [resolve(item) for item in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    return resolved


INFER_BODY: Final = {
    "required": True,
    "description": "`images`: UINT8 of the network's own size, NHWC or NCHW. `encoded_images`: BYTES, image "
    "files (base64 in JSON).",
    "content": {
        "application/json": {"schema": _inline(InferRequest)},
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

HEADER: Final = "Inference-Header-Content-Length"
"""Length of the JSON object where binary data follows it, bytes."""

INFER_PARAMETERS: Final = [
    {
        "name": HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1},
        "description": "Length of the JSON object where binary data follows it, bytes.",
    }
]
"""Header of the binary tensor data extension."""
