"""Serve the gRPC methods as routes whose bodies are the protocol's messages.

Each method but ``ModelInfer`` converts the document of a REST route (:data:`_DOCUMENTS`); ``ModelInfer`` shares
:func:`app.http.v2.infer_tensors` with REST.  Errors are exceptions, as everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from pydantic import BaseModel

from app.errors import BodyTooLarge, MalformedRequest
from app.grpc.messages import METHODS, PREFIX
from app.grpc.wire import check_counts
from app.http import v2
from app.http import v2 as repository
from app.http.body import parse, read_body
from app.http.v2 import InferRequest, Received, find_model, infer_tensors, request_of, to_binary
from app.service import service_of, service_to_predict

# The methods that need no key, as in REST.
_PUBLIC: Final = frozenset({"ServerLive", "ServerReady", "ModelReady", "ServerMetadata"})

_ADMIN: Final = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})

# The time in which a message without images must arrive; it holds no more than a name, a version and a flag.
SMALL_SECONDS: Final = 5.0

_SMALL_BYTES: Final = 64 * 1024  # the maximum size of such a message


def parsed(body: bytes, method: str) -> Any:
    """Parse the request message of a method."""
    message_type = METHODS[method][0]
    check_counts(body, message_type)
    try:
        return message_type.FromString(body)
    except DecodeError as error:
        raise MalformedRequest(f"the message is not a {message_type.DESCRIPTOR.name}") from error


async def _infer(request: Request) -> Response:
    service = service_to_predict(request)
    body = await read_body(request, service.settings.upload_seconds)
    message = await parse(service.parser, body, parsed, body, "ModelInfer")
    name, version = message.model_name, message.model_version or None
    find_model(service, name, version).engine.check_room()
    wanted, binary = await parse(service.parser, body, tensor_of, message)
    answer = await infer_tensors(service, name, version, Received(wanted, binary, body), request.receive)
    model = answer.served
    response = METHODS["ModelInfer"][1](model_name=model.name, model_version=model.model.version, id=message.id)
    response.parameters["alpha"].double_param = answer.alpha
    for tensor in answer.tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(to_binary(tensor))
    return Response(response.SerializeToString())


def tensor_of(message: Any) -> tuple[InferRequest, memoryview]:
    """Return a message as the request that REST has, and the binary data of its input."""
    raw = message.raw_input_contents
    if raw and (len(raw) != len(message.inputs) or any(each.HasField("contents") for each in message.inputs)):
        raise MalformedRequest("expected raw_input_contents for each input and no contents, or contents for each input")
    data = raw or [_from_contents(each) for each in message.inputs]
    inputs = [
        {"name": each.name, "datatype": each.datatype, "shape": list(each.shape), "parameters": _parameters(each)}
        for each in message.inputs
    ]
    for each, content in zip(inputs, data, strict=True):
        each["parameters"]["binary_data_size"] = len(content)
    outputs = [{"name": each.name, "parameters": _parameters(each)} for each in message.outputs]
    document = {"parameters": _parameters(message), "inputs": inputs, "outputs": outputs}
    return request_of(document), memoryview(data[0])


def _parameters(message: Any) -> dict[str, Any]:
    chosen = {name: each.WhichOneof("parameter_choice") for name, each in message.parameters.items()}
    return {name: choice and getattr(message.parameters[name], choice) for name, choice in chosen.items()}


def _from_contents(tensor: Any) -> bytes:
    """Return the typed contents of a tensor as its binary data."""
    if tensor.datatype == "BYTES":
        return b"".join(len(each).to_bytes(4, "little") + each for each in tensor.contents.bytes_contents)
    try:
        return bytes(tensor.contents.uint_contents)
    except ValueError as error:
        raise MalformedRequest(f"input {tensor.name!r}: expected whole numbers from 0 to 255") from error


async def _index(request: Request, message: Any) -> dict[str, Any]:
    models = await repository.index(request)
    return {"models": [each.model_dump() for each in models if each.state == "READY" or not message.ready]}


_DOCUMENTS: Final[Mapping[str, Callable[[Request, Any], Any]]] = {
    "ServerLive": lambda request, message: v2.live(),
    "ServerReady": lambda request, message: {"ready": not service_of(request).reasons()},
    "ServerMetadata": lambda request, message: v2.server_metadata(),
    "ModelReady": lambda request, message: {
        "ready": v2.is_model_ready(service_of(request), message.name, message.version or None)
    },
    "ModelMetadata": lambda request, message: v2.metadata_of(
        find_model(service_of(request), message.name, message.version or None)
    ),
    "RepositoryIndex": _index,
    "RepositoryModelLoad": lambda request, message: repository.load(request, message.model_name),
    "RepositoryModelUnload": lambda request, message: repository.unload(request, message.model_name),
}


async def _answer(request: Request) -> Response:
    """Answer any method but ``ModelInfer``; keys are checked before the message is read."""
    method = request.scope["path"].removeprefix(PREFIX)
    if method in _ADMIN:
        service_of(request).keys.check_admin(request.headers)
    elif method not in _PUBLIC:
        service_to_predict(request)
    message = METHODS[method][0]()
    if message.DESCRIPTOR.fields:  # A message without fields says nothing, and need not be waited for.
        body = await read_body(request, min(SMALL_SECONDS, service_of(request).settings.upload_seconds))
        if len(body) > _SMALL_BYTES:
            raise BodyTooLarge(f"expected a message of at most {_SMALL_BYTES} bytes, got {len(body)}; send less")
        message = parsed(body, method)
    found = _DOCUMENTS[method](request, message)
    document = await found if inspect.isawaitable(found) else found
    members = document.model_dump() if isinstance(document, BaseModel) else document
    return Response(ParseDict(members, METHODS[method][1](), ignore_unknown_fields=True).SerializeToString())


router = APIRouter(include_in_schema=False)
for _method in METHODS:
    router.add_api_route(PREFIX + _method, _infer if _method == "ModelInfer" else _answer, methods=["POST"])
