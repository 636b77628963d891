"""The documents of the Open Inference Protocol v2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from app.tasks.base import Datatype, tensor_names
from psc_core.model.pipeline import MAP
from psc_core.tasks.answer import Document
from psc_core.tasks.policy import Alpha

MAX_DIMENSIONS: Final = 8
"""The maximum number of dimensions of an input.

Validation stops at the first fault, because building an error for each of many elements would be slow."""

_NAMES: Final = (*tensor_names(), MAP)


class ErrorDocument(Document):
    """The reason why a request failed."""

    error: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses=`` of a route that can answer with errors of these statuses."""
    return {status: {"model": ErrorDocument} for status in statuses}


class ServerMetadata(Document):
    """The server and what it supports."""

    name: str
    version: str
    extensions: list[str]


class ServerLiveDocument(Document):
    """The answer of a process that is alive."""

    live: bool


class ServerReadyDocument(Document):
    """Whether all models are ready."""

    live: bool
    ready: bool


class ModelReadyDocument(Document):
    """Whether one model is ready."""

    name: str
    ready: bool


class RepositoryModel(Document):
    """A model of the repository."""

    name: str
    version: str = Field(description="The digest of the bundle; empty while the model is not in service.")
    state: Literal["READY", "UNAVAILABLE"]
    reason: str = Field(description="The reason why the model is not available.")


class TensorMetadata(Document):
    """A tensor; −1 stands for a size that varies."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Document):
    """The inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata] = Field(description="The inputs, of which a request has exactly one.")
    outputs: list[TensorMetadata]


class InferOutput(Document):
    """An output; ``data`` is left out if binary data follows the document."""

    name: str
    datatype: Datatype
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(Document):
    """The answer to an inference request."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any] = Field(description="`alpha`: the false-alarm rate behind `is_ood`.")
    outputs: list[InferOutput]


_OutputName = Literal[_NAMES]  # type: ignore[valid-type]


class RequestModel(BaseModel):
    """The base of a request's parts; undeclared members and parameters are ignored, as the protocol demands."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


def _reject(value: Any) -> None:
    if value is not None:
        raise ValueError("not supported by this server; leave it out")


_Unsupported = Annotated[None, BeforeValidator(_reject), Field(description="Not supported.")]


class _TensorParameters(RequestModel):
    """The parameters of a tensor; those that would change the answer if they were supported are refused."""

    shared_memory_region: _Unsupported = None
    classification: _Unsupported = None


class InputParameters(_TensorParameters):
    """The parameters of an input."""

    binary_data_size: int | None = Field(default=None, ge=0, description="The size of its binary data, bytes.")
    layout: Literal["NHWC", "NCHW"] | None = Field(
        default=None, description="The order of the axes; unset: the order that fits the shape."
    )


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
    """The parameters of a wanted output."""

    binary_data: bool | None = Field(
        default=None, description="Return binary data; unset: the request's `binary_data_output`."
    )


class WantedOutput(RequestModel):
    """An output that the answer should have."""

    name: _OutputName
    parameters: OutputParameters = OutputParameters()


class RequestParameters(RequestModel):
    """The parameters of a request."""

    alpha: Alpha | None = Field(default=None, description="`is_ood` if p ≤ alpha, in this request.")
    monitor: bool = Field(default=True, description="`false` leaves the images out of drift and metrics of scores.")
    binary_data_output: bool = Field(
        default=False, description="Return outputs as binary data unless their own parameters say otherwise."
    )


class InferRequest(RequestModel):
    """An inference request; without ``outputs``, the answer has all of them but ``map``."""

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
        """Map each wanted output, or each available one, to whether it is returned as binary data."""
        default = self.parameters.binary_data_output
        if not self.outputs:
            return dict.fromkeys(available, default)
        given = {output.name: output.parameters.binary_data for output in self.outputs}
        return {name: default if binary is None else binary for name, binary in given.items()}


def _inline(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model with its references resolved."""
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
    "description": "Either `images`: UINT8 pixels of the network's input size, NHWC or NCHW; or `encoded_images`: "
    "BYTES, image files (base64 in JSON).",
    "content": {
        "application/json": {"schema": _inline(InferRequest)},
        "application/octet-stream": {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "The JSON object, then the binary data of its tensors.",
            }
        },
    },
}
"""The body of an inference request, for OpenAPI."""

HEADER: Final = "Inference-Header-Content-Length"
"""The header with the length of the JSON object, bytes, if binary data follows it."""

INFER_PARAMETERS: Final = [
    {
        "name": HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1},
        "description": "The length of the JSON object, bytes, if binary data follows it.",
    }
]
"""The header of the binary tensor data extension, for OpenAPI."""
