"""The Open Inference Protocol v2 over gRPC: the routes of :mod:`app.http.v2` on a second port.

Each call is a POST to the path of its method, with the message as the body.  So limits, keys, metrics, traces and
errors are those of every other request.  :data:`CODES` gives the code of an error; ``retry-after`` and
``traceresponse`` are sent as trailing metadata.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, unquote

import grpc
import orjson
from fastapi import APIRouter, Request, Response
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel
from starlette.types import ASGIApp, Message

from app.errors import BodyTooLarge, MalformedRequest, TooManyRequests
from app.http import v2
from app.http.body import MAX_VALUES, parse, read_body
from app.http.v2 import InferRequest, find_model, infer_tensors, request_of, to_binary
from app.service import Service, service_of, service_to
from psc_core.errors import UsageError, shorten
from psc_core.network.onnx_check import GROUPS, LENGTH, fields

logger = logging.getLogger("psc.grpc")

# Maps an HTTP status to the gRPC status code that means the same.
CODES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    415: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# A descriptor pool of our own: a client in the same process may register messages with the same names.
_SET: Final = FileDescriptorSet.FromString(files("app").joinpath("open_inference.binpb").read_bytes())
_POOL: Final = DescriptorPool()
_POOL.AddSerializedFile(_SET.file[0].SerializeToString())
_SERVICE: Final = _POOL.FindServiceByName("inference.GRPCInferenceService")
# Maps the name of a method to the classes of its request and its response.
METHODS: Final[Mapping[str, tuple[Any, Any]]] = {
    method.name: (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
    for method in _SERVICE.methods
}
PREFIX: Final = f"/{_SERVICE.full_name}/"  # the part of a method's HTTP/2 path before its name
MAX_OCCURRENCES: Final = 256  # the maximum number of times that a field occurs in a message and those inside it
# The limits of fields that may occur more often: image files, and pixels, which are counted in bytes.
HIGHER: Final[Mapping[str, int]] = {
    "inference.InferTensorContents.uint_contents": MAX_VALUES,
    "inference.InferTensorContents.bytes_contents": 1 << 14,
}
# The maximum number of unpacked occurrences of a field, each of which is a step of the walk; writers pack numbers.
MAX_UNPACKED: Final = 1 << 14
_NEVER_PACKED: Final = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_counts(body: memoryview, message: Any, seen: Counter[str]) -> None:
    """Refuse a serialized message, described so, in which a field occurs too often, before it is parsed to objects.

    The cost of a message lies in its fields, not its bytes: an empty output is two bytes, and ten million of them take
    20 GB as objects, parsed with the interpreter's lock held.  So the wire format is walked, by the descriptors, up to
    the first field that occurs too often.  Truncated or malformed messages are left to the parser.
    """
    for number, wire_type, content in fields(body):
        if wire_type in GROUPS:
            raise MalformedRequest("expected a message without groups, which proto3 does not have; leave them out")
        field = message.fields_by_number.get(number)
        name = "unknown fields" if field is None else field.full_name
        # A packed number has at least one byte; an exact count would cost another pass.
        is_packed = field is not None and wire_type == LENGTH and field.type not in _NEVER_PACKED
        seen[name] += len(content) if is_packed else 1
        limit = HIGHER.get(name, MAX_OCCURRENCES)
        if seen[name] > (limit := limit if is_packed else min(limit, MAX_UNPACKED)):
            raise MalformedRequest(
                f"expected at most {limit} {'bytes of ' * is_packed}{name.rpartition('.')[2]} in a message, got more; "
                "send fewer, and pixels as raw_input_contents"
            )
        if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE and wire_type == LENGTH:
            check_counts(content, field.message_type, seen)


_PUBLIC: Final = frozenset({"ServerLive", "ServerReady", "ModelReady", "ServerMetadata"})  # need no key, as in REST
_ADMIN: Final = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
# The time in which a message without images must arrive; it holds no more than a name, a version and a flag.
SMALL_SECONDS: Final = 5.0
_SMALL_BYTES: Final = 64 * 1024  # the maximum size of such a message


def parse_message(body: bytes, method: str) -> Any:
    """Parse the request message of a method."""
    message_type = METHODS[method][0]
    check_counts(memoryview(body), message_type.DESCRIPTOR, Counter())
    try:
        return message_type.FromString(body)
    except DecodeError as error:
        raise MalformedRequest(f"the message is not a {message_type.DESCRIPTOR.name}") from error


async def _infer(request: Request) -> Response:
    service = service_to("predict", request)
    body = await read_body(request, service.settings.upload_seconds)
    message = await parse(service.parser, body, parse_message, body, "ModelInfer")
    name, version = message.model_name, message.model_version or None
    find_model(service, name, version).engine.check_room()
    wanted, binary = await parse(service.parser, body, tensor_of, message)
    served, alpha, tensors = await infer_tensors(
        service, name, version, wanted, binary, body=body, receive=request.receive
    )
    response = METHODS["ModelInfer"][1](model_name=served.name, model_version=served.model.version, id=message.id)
    response.parameters["alpha"].double_param = alpha
    for tensor in tensors:
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
    return request_of(InferRequest, document), memoryview(data[0])


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
    "RepositoryIndex": lambda request, message: {
        "models": [each.model_dump() for each in v2.models_of(service_of(request), only_ready=message.ready)]
    },
    "RepositoryModelLoad": lambda request, message: v2.load_model(
        service_of(request), message.model_name, {"parameters": _parameters(message)}
    ),
    "RepositoryModelUnload": lambda request, message: v2.unload(request, message.model_name),
}


async def _answer(request: Request) -> Response:
    """Answer any method but ``ModelInfer``; keys are checked before the message is read."""
    method = request.scope["path"].removeprefix(PREFIX)
    if method in _ADMIN:
        service_to("admin", request)
    elif method not in _PUBLIC:
        service_to("predict", request)
    message = METHODS[method][0]()
    if message.DESCRIPTOR.fields:  # A message without fields says nothing, and need not be waited for.
        body = await read_body(request, min(SMALL_SECONDS, service_of(request).settings.upload_seconds))
        if len(body) > _SMALL_BYTES:
            raise BodyTooLarge(f"expected a message of at most {_SMALL_BYTES} bytes, got {len(body)}; send less")
        message = parse_message(body, method)
        if getattr(message, "repository_name", ""):
            raise MalformedRequest("repository_name is not supported by this server; leave it out")
    found = _DOCUMENTS[method](request, message)
    document = await found if inspect.isawaitable(found) else found
    members = document.model_dump() if isinstance(document, BaseModel) else document
    return Response(ParseDict(members, METHODS[method][1](), ignore_unknown_fields=True).SerializeToString())


router = APIRouter(include_in_schema=False)
for _method in METHODS:
    router.add_api_route(PREFIX + _method, _infer if _method == "ModelInfer" else _answer, methods=["POST"])


# The grace period in which a message keeps its place; at most a third of the time in which it must arrive.
MESSAGE_SECONDS: Final = 5.0
MAX_WAITING: Final = 256  # the maximum number of calls that wait for a place; each wait costs a pass over all others


@dataclass(eq=False)
class _Place:
    client: str
    scope: asyncio.Timeout  # Ends the wait for a place and, once the place is granted, the use of it.
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    grace_ends_at: float = 0.0


class Places:
    """Places in which messages arrive, shared fairly by the calls of many clients.

    gRPC delivers a message only when it is complete, so its size cannot be limited while it arrives, only the number of
    messages that arrive at once.  A free place goes to the waiting call whose client has the fewest.  While other calls
    wait, the client with the most places loses its oldest one after a grace period; without such calls, a place is kept
    however slow the message is.  No client may have all of several places, so that another client finds one free.
    """

    def __init__(self, count: int, seconds: float) -> None:  # seconds in which a message must arrive
        self._count = max(1, count)
        self._grace = min(MESSAGE_SECONDS, seconds / 3)
        # Shorter than the time to arrive, so that a call that only waited is told so, and not to send faster.
        self._patience = 0.9 * seconds
        self._held: list[_Place] = []  # Oldest first, as is the next list.
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it within the block."""
        if sum(each.client == client for each in self._waiting) >= _most_of(MAX_WAITING) or (
            len(self._waiting) >= MAX_WAITING
        ):
            raise TooManyRequests("too many calls wait to send their messages; try again in 1 s", retry_after=1)
        place = _Place(client, asyncio.timeout(self._patience))
        try:
            async with place.scope:
                self._waiting.append(place)
                self._assign()
                await place.granted
                yield
        except TimeoutError as error:
            if not place.scope.expired():
                raise
            reason = f"the message did not arrive within {self._grace:g} s while others waited; send it at once"
            if place in self._waiting:
                reason = "too many other messages were arriving; try again in 1 s"
            raise TooManyRequests(reason, retry_after=1) from error
        finally:
            (self._held if place in self._held else self._waiting).remove(place)
            self._assign()

    def _assign(self) -> None:
        """Grant free places to waiting calls, and let as many places expire as the calls still waiting could have."""
        now = asyncio.get_running_loop().time()
        places, most = Counter(each.client for each in self._held), _most_of(self._count)
        while len(self._held) < self._count:
            # A call whose wait has timed out has its future cancelled, and stays in the list until its task runs.
            able = [each for each in self._waiting if places[each.client] < most and not each.granted.done()]
            if not able:
                break
            each = min(able, key=lambda each: places[each.client])  # min() takes the oldest among equals.
            self._waiting.remove(each)
            self._held.append(each)
            places[each.client] += 1
            each.grace_ends_at = now + self._grace
            each.granted.set_result(None)
        waiting = Counter(each.client for each in self._waiting if not each.granted.done())
        wanted = sum(min(count, most) for count in waiting.values())
        most_places_first = sorted(self._held, key=lambda each: -places[each.client])  # Stable: the oldest first.
        for rank, each in enumerate(most_places_first):
            if not each.scope.expired():
                each.scope.reschedule(max(now, each.grace_ends_at) if rank < wanted else None)


def _most_of(count: int) -> int:  # for one client
    return max(1, count * 3 // 4)


# The metadata of a call that become headers of its request.
_PASSED_ON: Final = frozenset({"authorization", "x-api-key", "traceparent", "tracestate"})
_DETAIL_BYTES: Final = 4096  # of a percent-encoded detail; gRPC drops the status behind more than 8 KiB of metadata
PING_MS: Final = 5000  # the shortest time between a client's pings; gRPC's own, 5 min, ends calls of common clients
_SMALL_AT_ONCE: Final = 16  # the number of messages without images that may arrive at once


@asynccontextmanager
async def serving(app: ASGIApp, service: Service) -> AsyncIterator[None]:
    """Answer calls within the block; at its end, finish the accepted ones in the time that draining leaves."""
    settings = service.settings
    largest = min(settings.grpc_message_bytes, settings.max_body_bytes)
    with_images = Places(service.memory.total // largest, settings.upload_seconds)
    without = Places(_SMALL_AT_ONCE, min(SMALL_SECONDS, settings.upload_seconds))
    server = grpc.aio.server(
        handlers=[_Calls(app, with_images, without)],
        options=[
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_connection_idle_ms", 1000 * settings.keep_alive_seconds),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", PING_MS),
        ],
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        if settings.tls_certificate is None or settings.tls_key is None:
            server.add_insecure_port(address)
        else:
            pair = settings.tls_key.read_bytes(), settings.tls_certificate.read_bytes()
            server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise UsageError(f"cannot listen on {address} for gRPC; choose another port") from error
    await server.start()
    logger.info("gRPC on %s", address)
    try:
        yield
    finally:
        service.begin_drain()
        await server.stop(service.answer_seconds_left())


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handler of all calls.

    A unary request is handled as a stream of one message, so that the message is read only when the application asks
    for it, and no more messages arrive at once than fit in memory.  Messages with images and those without have places
    of their own and do not wait for one another.
    """

    def __init__(self, app: ASGIApp, with_images: Places, without: Places) -> None:
        self._app, self._with_images, self._without = app, with_images, without
        self._answers: set[asyncio.Task[None]] = set()

    def service(self, details: Any) -> Any:
        """Return the handler of a call; None for a method that the protocol does not have."""
        is_known = details.method.removeprefix(PREFIX) in METHODS
        return grpc.stream_unary_rpc_method_handler(partial(self._call, details.method)) if is_known else None

    async def _call(self, path: str, messages: AsyncIterator[bytes], context: Any) -> bytes:
        has_left = asyncio.Event()
        reading: asyncio.Task[Message] | None = None
        places = self._with_images if path == PREFIX + "ModelInfer" else self._without
        # Of ipv4:127.0.0.1:80 or ipv6:%5B::1%5D:80 without the port: a client's connections share its places.
        host = unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
        start, body = dict[str, Any](), bytearray()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": "POST",
            "scheme": "grpc",
            "path": path,
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in context.invocation_metadata() if k in _PASSED_ON],
            "client": (host, 0),
        }

        async def first_message() -> Message:
            async with places.place(host):
                async for message in messages:
                    return {"type": "http.request", "body": message}
            return {"type": "http.disconnect"}

        async def receive() -> Message:
            nonlocal reading
            if reading is None:
                reading = asyncio.ensure_future(first_message())
                try:
                    return await reading
                except asyncio.CancelledError:
                    if not has_left.is_set():
                        raise
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            start.update(message if message["type"] == "http.response.start" else {})
            body.extend(message.get("body", b""))

        answer = asyncio.ensure_future(self._app(scope, receive, send))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        try:
            await asyncio.shield(answer)
        except asyncio.CancelledError:  # The client has left, or its deadline has passed: an HTTP disconnect.
            has_left.set()
            if reading is not None:  # It may still wait for a place, which it must not get.
                reading.cancel()
            raise
        except Exception:
            logger.exception("a call failed")
            start["status"] = 500  # The answer may have begun with another status.
            body.clear()
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start.get("headers", ())]
        context.set_trailing_metadata([each for each in headers if each[0] in ("retry-after", "traceresponse")])
        if (status := start.get("status", 500)) >= 400:
            detail = orjson.loads(body)["detail"] if body else "internal error; see the log"
            while len(quote(detail)) > _DETAIL_BYTES:
                detail = shorten(detail, len(detail) * 3 // 4)
            await context.abort(grpc.StatusCode[CODES.get(status, "UNKNOWN")], detail)
        return bytes(body)
