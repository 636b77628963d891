"""The Open Inference Protocol v2 over REST, with the binary tensor extension and the model repository.

Engine, limits, keys and thresholds are those of ``/predict``; errors are the protocol's ``{"error": "…"}``.  A request
may set the parameter ``alpha`` for ``is_ood``; the answer's parameters give the alpha that was used.  gRPC requests
pass through here too.

::

    body ─ parse_request ─▶ InferRequest ─ images_of ─▶ uint8 array or encoded files
    arrays ─ build_response ─▶ body, length of its JSON header

A body is one JSON object.  With the binary tensor extension, the header ``Inference-Header-Content-Length`` gives the
object's length, and the data of the tensors that have a ``binary_data_size`` follow it in order: little-endian,
row-major, each ``BYTES`` element after its 4-byte length.  In JSON, data are flat or nested as ``shape`` says; elements
of ``BYTES`` are base64 text, because a JSON string cannot hold the bytes of an image.

A request has exactly one input: ``images`` (``UINT8``, NHWC or NCHW, of the network's input size) or
``encoded_images`` (``BYTES``, image files).  Loading a model that is in service reads its bundle again, as
``POST /admin/reload`` does.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from starlette.types import Receive

from app.errors import MalformedRequest, TooManyImages, UnknownModel, get_and_head
from app.http.body import FILE_SCHEMA, decode_base64, has_disconnected, load_json, parse, read_body, read_json_body
from app.inference.batcher import RequestMode
from app.inference.decoder import EncodedImage
from app.models import ServedModel
from app.service import Service, service_of, service_to
from psc_core import __version__
from psc_core.answers import Alpha, Document
from psc_core.errors import fault, shorten
from psc_core.pipeline import MAP
from psc_core.tasks import TASKS
from psc_core.tasks.base import CHECKS_OUTPUT, Datatype

# The maximum number of dimensions of an input. Validation stops at the first fault, because building an error for
# each of many elements would be slow.
MAX_DIMENSIONS: Final = 8
_NAMES: Final = (*dict.fromkeys(name for task in TASKS.values() for name in task.tensors), MAP)


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


class RequestModel(BaseModel):
    """The base of a request's parts; undeclared members and parameters are ignored, as the protocol demands."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, document: Any) -> Any:
        """Take a member that is null as absent, as clients write what they leave out."""
        is_object = isinstance(document, dict)
        return {name: value for name, value in document.items() if value is not None} if is_object else document


AnyRequest = TypeVar("AnyRequest", bound=RequestModel)


def _reject(value: Any) -> None:
    if value is not None:
        raise ValueError("not supported by this server; leave it out")


_Unsupported = Annotated[None, BeforeValidator(_reject), Field(description="Not supported.")]
_Off = Annotated[
    None, BeforeValidator(lambda value: None if value is False else _reject(value)), Field(description="Not supported.")
]


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

    name: Literal[_NAMES]  # type: ignore[valid-type]
    parameters: OutputParameters = OutputParameters()


class RequestParameters(RequestModel):
    """The parameters of a request; those that only `/predict` has are refused."""

    alpha: Alpha | None = Field(default=None, description="`is_ood` if p ≤ alpha, in this request.")
    monitor: bool = Field(default=True, description="`false` leaves the images out of drift and metrics of scores.")
    binary_data_output: bool = Field(
        default=False, description="Return outputs as binary data unless their own parameters say otherwise."
    )
    ambiguity_threshold: _Unsupported = None
    max_width: _Unsupported = None
    top_k: _Unsupported = None
    explain: _Off = None
    map: _Off = None


class IndexRequest(RequestModel):
    """What the list of models should have."""

    ready: bool = Field(default=False, description="Whether to leave out models that are not ready.")


def _check_one(inputs: Any) -> Any:
    if isinstance(inputs, list) and len(inputs) != 1:
        raise ValueError(f"give one of 'images' and 'encoded_images', got {len(inputs)} inputs")
    return inputs


class LoadRequest(RequestModel):
    """What a request to load may say; the bundle is always the one that the service was started with."""

    parameters: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.parameters:
            if name == "config" or name.startswith("file:"):
                raise ValueError(f"{shorten(name)} is not supported by this server; leave it out")
        return self


class InferRequest(RequestModel):
    """An inference request; without ``outputs``, the answer has all of them but ``map``."""

    id: str | None = None
    parameters: RequestParameters = RequestParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1), FailFast(), BeforeValidator(_check_one)]
    outputs: Annotated[list[WantedOutput], Field(max_length=len(_NAMES)), FailFast()] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({output.name for output in self.outputs}) < len(self.outputs):
            raise ValueError("name each output once")
        return self


def _inline(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a request's part with its references resolved; what may be absent may be null."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(parts[value["$ref"].rpartition("/")[2]])
            made = {key: resolve(item) for key, item in value.items() if key != "default"}
            for name in made.get("properties", {}).keys() - made.get("required", []):
                made["properties"][name] = {"anyOf": [made["properties"][name], {"type": "null"}]}
            return made
        return [resolve(item) for item in value] if isinstance(value, list) else value

    return cast(dict[str, Any], resolve(schema))


# The body of an inference request, for OpenAPI.
INFER_BODY: Final = {
    "required": True,
    "description": "Either `images`: UINT8 pixels of the network's input size, NHWC or NCHW; or `encoded_images`: "
    "BYTES, image files (base64 in JSON).",
    "content": {
        "application/json": {"schema": _inline(InferRequest)},
        "application/octet-stream": {
            "schema": {**FILE_SCHEMA, "description": "The JSON object, then the binary data of its tensors."}
        },
    },
}
HEADER: Final = "Inference-Header-Content-Length"  # of the binary tensor data extension
INFER_PARAMETERS: Final = [
    {
        "name": HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1},
        "description": "The length of the JSON object, bytes, if binary data follows it.",
    }
]
_LENGTH: Final = 4
_DTYPES: Final = {"FP32": "<f4", "INT64": "<i8", "UINT8": "|u1", "BOOL": "|b1"}


@dataclass(frozen=True)
class OutputTensor:
    """One output: an array, or for ``BYTES`` a sequence of texts."""

    name: str
    datatype: Datatype
    shape: Sequence[int]
    values: npt.NDArray[Any] | Sequence[str]
    is_binary: bool = False  # whether the request asks for binary data


def parse_request(body: bytes, header_length: str | None) -> tuple[InferRequest, memoryview | None]:
    """Parse a request body; return the request, and the binary data of its input if it has any."""
    length = _header_length(header_length, len(body))
    text, binary = body if length == len(body) else body[:length], memoryview(body)[length:]
    request = request_of(InferRequest, load_json(text))
    size = request.inputs[0].parameters.binary_data_size
    if len(binary) != (size or 0):
        raise MalformedRequest(
            f"expected {size or 0} bytes of binary data, got {len(binary)}; check binary_data_size and {HEADER}"
        )
    return request, None if size is None else binary


def request_of(kind: type[AnyRequest], document: Any) -> AnyRequest:
    """Return the request in a JSON document."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise MalformedRequest(f"request: {fault(error.errors(include_input=False, include_url=False)[0])}") from error


def images_of(
    tensor: InputTensor, binary: memoryview | None, shape: tuple[int, int, int], *, max_images: int
) -> npt.NDArray[np.uint8] | list[bytes]:
    """Return the n ≥ 1 images of an input: ``uint8`` (n, channels, height, width), or encoded files."""
    if tensor.name == "images":
        layout = _layout(tensor, shape)
    elif len(tensor.shape) != 1 and tensor.shape[1:] != [1]:
        raise _bad_shape(tensor, "[n] or [n, 1]")
    count = tensor.shape[0]
    if count < 1:
        raise MalformedRequest(f"input {tensor.name!r} has no image; add one")
    if count > max_images:
        raise TooManyImages(f"expected at most {max_images} images, got {count}; split the request")
    if tensor.name == "encoded_images":
        return _files_from_json(tensor, count) if binary is None else _files(tensor, binary, count)
    pixels = _pixels(tensor, binary).reshape(tensor.shape)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2) if layout == "NHWC" else pixels)


def build_response(head: Mapping[str, Any], tensors: Sequence[OutputTensor]) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON part if binary data follows it."""
    outputs: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        if tensor.is_binary:
            buffers.append(to_binary(tensor))
            output["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            values = tensor.values
            output["data"] = np.ascontiguousarray(values).ravel() if isinstance(values, np.ndarray) else values
        outputs.append(output)
    document = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((document, *buffers)), len(document)) if buffers else (document, None)


def to_binary(tensor: OutputTensor) -> bytes:
    """Return the values as bytes, in the form of the binary tensor extension and of gRPC's raw contents."""
    if isinstance(tensor.values, np.ndarray):
        return np.ascontiguousarray(tensor.values, dtype=_DTYPES[tensor.datatype]).tobytes()
    encoded = [value.encode() for value in tensor.values]
    return b"".join(len(value).to_bytes(_LENGTH, "little") + value for value in encoded)


def _header_length(value: str | None, body_length: int) -> int:
    if value is None:
        return body_length
    if not (value.isascii() and value.isdigit() and len(value) < 16 and 0 < int(value) <= body_length):
        raise MalformedRequest(
            f"expected {HEADER} from 1 to the body's {body_length} bytes, got "
            f"{value[:32]!r}; send the length of the JSON object"
        )
    return int(value)


def _layout(tensor: InputTensor, shape: tuple[int, int, int]) -> str:
    """Return the layout that the parameter names, else the one that the shape fits; NHWC if both fit."""
    channels, height, width = shape
    sizes = {"NHWC": [height, width, channels], "NCHW": [channels, height, width]}
    named = tensor.parameters.layout
    for layout in [named] if named else sizes:
        if len(tensor.shape) == 4 and tensor.shape[1:] == sizes[layout]:
            return layout
    choices = " or ".join(
        f"[n, {', '.join(map(str, sizes[layout]))}] ({layout})" for layout in ([named] if named else sizes)
    )
    raise _bad_shape(tensor, f"{choices}; send images of other sizes as 'encoded_images'")


def _pixels(tensor: InputTensor, binary: memoryview | None) -> npt.NDArray[np.uint8]:
    size = math.prod(tensor.shape)
    if binary is not None:
        if len(binary) != size:
            raise _bad_size(tensor, size, len(binary), "bytes")
        return np.frombuffer(binary, np.uint8)
    try:
        # As objects: in an array of strings, every element would take as much memory as the longest.
        values = np.asarray(tensor.data, dtype=object)
    except ValueError as error:
        raise MalformedRequest(f"input {tensor.name!r}: expected rows of equal length; pad or cut them") from error
    types = set(map(type, values.ravel().tolist()))
    if list in types:
        raise MalformedRequest(f"input {tensor.name!r}: expected rows of equal length; pad or cut them")
    if values.size != size:
        raise _bad_size(tensor, size, values.size, "values")
    if values.ndim > 1 and values.shape != tuple(tensor.shape):  # Reshaped, the pixels would be those of another image.
        raise _bad_nesting(tensor, values.shape)
    if types != {int} or values.min() < 0 or values.max() > 255:
        raise MalformedRequest(f"input {tensor.name!r}: expected whole numbers from 0 to 255")
    return values.astype(np.uint8)


def _files(tensor: InputTensor, binary: memoryview, count: int) -> list[bytes]:
    files: list[bytes] = []
    while len(binary):
        size = int.from_bytes(binary[:_LENGTH], "little")
        if len(files) == count:
            raise _bad_size(tensor, count, count + 1, "elements behind 4-byte lengths")
        if len(binary) < _LENGTH + size:
            should = f"should have {size} bytes behind its length, got {len(binary) - _LENGTH}"
            raise MalformedRequest(
                f"input {tensor.name!r}: element {len(files)} "
                f"{should if len(binary) >= _LENGTH else 'ends within its length'}; send the length of each file "
                "before it, as 4 bytes, little-endian"
            )
        files.append(bytes(binary[_LENGTH : _LENGTH + size]))
        binary = binary[_LENGTH + size :]
    if len(files) != count:
        raise _bad_size(tensor, count, len(files), "elements")
    return files


def _files_from_json(tensor: InputTensor, count: int) -> list[bytes]:
    data = tensor.data or []
    if len(data) != count:
        raise _bad_size(tensor, count, len(data), "elements")
    if any(isinstance(value, list) for value in data):
        if len(tensor.shape) != 2 or not all(isinstance(value, list) and len(value) == 1 for value in data):
            raise _bad_nesting(tensor)
        data = [value for (value,) in data]
    return [decode_base64(value, f"input {tensor.name!r}, element {index}") for index, value in enumerate(data)]


def _bad_shape(tensor: InputTensor, expected: str) -> MalformedRequest:
    return MalformedRequest(f"input {tensor.name!r}: expected shape {expected}; got {reprlib.repr(list(tensor.shape))}")


def _bad_nesting(tensor: InputTensor, got: Sequence[int] = ()) -> MalformedRequest:
    lists = f", got lists of {list(got)}" if got else ""
    return MalformedRequest(
        f"input {tensor.name!r}: expected flat data, or lists nested as its shape {list(tensor.shape)}{lists}; "
        "correct shape or data"
    )


def _bad_size(tensor: InputTensor, expected: int, got: int, unit: str) -> MalformedRequest:
    return MalformedRequest(
        f"input {tensor.name!r}: expected {expected} {unit} for shape {list(tensor.shape)}, got {got}; "
        "correct shape or data"
    )


def find_model(service: Service, name: str, version: str | None) -> ServedModel:
    """Return the model of this name and, if one is given, this version."""
    served = service.registry.get(name)
    if version is not None and version != (own := served.model.version):
        raise UnknownModel(f"model {name!r} has the version {own!r}, not {version!r}; see /v2/models/{name}")
    return served


async def infer_tensors(
    service: Service,
    name: str,
    version: str | None,
    wanted: InferRequest,
    binary: memoryview | None,
    *,
    body: bytes,
    receive: Receive,
) -> tuple[ServedModel, float, list[OutputTensor]]:
    """Answer a request; return the model that answered, the alpha behind ``is_ood`` and the wanted outputs.

    The whole body decides by its size whether its images are parsed on a thread.
    """
    served, limit = find_model(service, name, version), service.settings.max_images_per_request
    while True:
        read = partial(images_of, wanted.inputs[0], binary, served.model.preprocess.shape, max_images=limit)
        images = await parse(service.parser, body, read)
        before, served = served, find_model(service, name, version)
        if served is before:  # Or a reload has swapped the model, whose input may have another size now.
            break
    task, classes, checks = served.model.task, served.model.classes, served.model.checks
    # Each wanted output, or each that the model returns, and whether as binary data.
    as_binary = dict.fromkeys(() if wanted.outputs else output_names(served), wanted.parameters.binary_data_output)
    for asked in wanted.outputs:
        own = asked.parameters.binary_data
        as_binary[asked.name] = wanted.parameters.binary_data_output if own is None else own
    unknown = [output for output in as_binary if output not in task.tensors and output != MAP]
    if unknown:
        known = (*task.tensors, *([] if served.model.pipeline.map is None else [MAP]))
        raise MalformedRequest(f"model {served.name!r} has no output {unknown[0]!r}; expected some of {known}")
    alpha = wanted.parameters.alpha
    policy = served.policy if alpha is None else served.policy_with(alpha=alpha)
    outputs, decisions, explanation = await served.predict(
        images if isinstance(images, np.ndarray) else [EncodedImage(data) for data in images],
        policy,
        disconnected=partial(has_disconnected, receive),
        mode=RequestMode.MAP if MAP in as_binary else RequestMode.PREDICT,
        monitor=wanted.parameters.monitor,
    )
    tensors = [
        OutputTensor(MAP, "UINT8", list(explanation[MAP].shape), explanation[MAP], is_binary)
        if output == MAP
        else OutputTensor(
            output,
            task.tensors[output],
            [len(outputs), *task.tensor_shape(output, classes, checks)],
            task.tensor(output, outputs, decisions, classes),
            is_binary,
        )
        for output, is_binary in as_binary.items()
    ]
    return served, policy.alpha, tensors


def output_names(served: ServedModel) -> tuple[str, ...]:
    """Return the names of the outputs that a model returns unless the request names some.

    A model without checks leaves out theirs, though a request may name it.
    """
    return tuple(name for name in served.model.task.tensors if name != CHECKS_OUTPUT or served.model.checks)


_ERRORS: Final = errors(400, 403, 404, 409, 422, 500)
repository_router = APIRouter(prefix="/v2/repository", tags=["open inference protocol v2"], responses=errors(401, 415))


@repository_router.post(
    "/index",
    summary="Models of the repository",
    responses=errors(400, 408),
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": _inline(IndexRequest)}}}},
)
async def index(request: Request) -> list[RepositoryModel]:
    """List every model, its version and whether it answers."""
    service = service_to("predict", request)
    body = await read_json_body(request, service.settings.upload_seconds)
    return models_of(service, only_ready=request_of(IndexRequest, load_json(body or b"{}")).ready)


def models_of(service: Service, *, only_ready: bool) -> list[RepositoryModel]:
    """Return the models of the repository."""
    registry = service.registry
    reasons = registry.reasons() | dict.fromkeys(registry.unloaded, "unloaded")
    versions = {served.name: served.model.version for served in registry.served}
    return [
        RepositoryModel(
            name=name,
            version=versions.get(name, ""),
            state="UNAVAILABLE" if name in reasons else "READY",
            reason=reasons.get(name, ""),
        )
        for name in registry.names
        if not (only_ready and name in reasons)
    ]


@repository_router.post(
    "/models/{name}/load",
    summary="Load a model",
    responses={**_ERRORS, **errors(408)},
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": _inline(LoadRequest)}}}},
)
async def load(request: Request, name: str) -> dict[str, str]:
    """Load and warm up the model's bundle, then swap it in; a bad bundle changes nothing."""
    service = service_to("admin", request)
    body = await read_json_body(request, service.settings.upload_seconds)
    return await load_model(service, name, load_json(body or b"{}"))


async def load_model(service: Service, name: str, document: Any) -> dict[str, str]:
    """Load a model as the document of a request asks."""
    request_of(LoadRequest, document)
    await service.registry.reload(name)
    return {}


@repository_router.post("/models/{name}/unload", summary="Unload a model", responses=_ERRORS)
async def unload(request: Request, name: str) -> dict[str, str]:
    """Take the model out of service; the requests that it has admitted are answered."""
    service = service_to("admin", request)
    service.registry.unload(name)
    return {}


_METADATA_ERRORS: Final = errors(401, 404)
_READINESS: Final = {503: {"model": ModelReadyDocument}, **errors(404)}
_INFER: Final[Mapping[str, Any]] = {
    "response_model": InferResponse,
    "responses": {
        200: {"content": {"application/octet-stream": {"schema": FILE_SCHEMA}}},
        **errors(400, 401, 404, 408, 415, 422, 500, 504),
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
    """Answer 200 if every model is ready; else 503. Unloaded models count only if all are."""
    is_ready = not service_of(request).reasons()
    response.status_code = 200 if is_ready else 503
    return ServerReadyDocument(live=True, ready=is_ready)


@router.get("/models/{name}", summary="Model metadata", responses=_METADATA_ERRORS)
async def model_metadata(request: Request, name: str) -> ModelMetadata:
    """Describe a model's inputs and outputs; a request has one of the two inputs."""
    return metadata_of(find_model(service_to("predict", request), name, None))


@router.get("/models/{name}/versions/{version}", summary="Metadata of a model's version", responses=_METADATA_ERRORS)
async def version_metadata(request: Request, name: str, version: str) -> ModelMetadata:
    """Describe a model if this version, the digest of its bundle, is in service."""
    return metadata_of(find_model(service_to("predict", request), name, version))


@get_and_head(router, "/models/{name}/ready", summary="Model readiness", responses=_READINESS)
async def model_ready(request: Request, response: Response, name: str) -> ModelReadyDocument:
    """Answer 200 if the model is ready; else 503."""
    return _readiness(request, response, name, None)


@get_and_head(
    router, "/models/{name}/versions/{version}/ready", summary="Readiness of a model's version", responses=_READINESS
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
    maps = []
    if model.pipeline.map is not None:  # The answer has the map only if the request names it.
        grid = model.pipeline.map.grid
        maps = [TensorMetadata(name=MAP, datatype="UINT8", shape=[-1, grid.rows, grid.columns])]
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
                datatype=served.model.task.tensors[name],
                shape=[-1, *served.model.task.tensor_shape(name, model.classes, model.checks)],
            )
            for name in output_names(served)
        ]
        + maps,
    )


def is_model_ready(service: Service, name: str, version: str | None) -> bool:
    """Return whether a model is ready."""
    if name in {*service.registry.unloaded, *service.registry.reasons()}:
        return False
    find_model(service, name, version)
    return "service" not in service.reasons()


def _readiness(request: Request, response: Response, name: str, version: str | None) -> ModelReadyDocument:
    is_ready = is_model_ready(service_of(request), name, version)
    response.status_code = 200 if is_ready else 503
    return ModelReadyDocument(name=name, ready=is_ready)


async def _infer(request: Request, name: str, version: str | None) -> Response:
    service = service_to("predict", request)
    find_model(service, name, version).engine.check_room()
    of_head = request.headers.get(HEADER)
    read = read_json_body if of_head is None else read_body
    body = await read(request, service.settings.upload_seconds)
    wanted, binary = await parse(service.parser, body, parse_request, body, of_head)
    served, alpha, tensors = await infer_tensors(
        service, name, version, wanted, binary, body=body, receive=request.receive
    )
    head = {"model_name": served.name, "model_version": served.model.version, "parameters": {"alpha": alpha}}
    document, length = build_response(head if wanted.id is None else head | {"id": wanted.id}, tensors)
    if length is None:
        return Response(document, media_type="application/json")
    return Response(document, media_type="application/octet-stream", headers={HEADER: str(length)})
