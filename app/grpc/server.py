"""Pass gRPC calls to the application: each is a POST to the path of its method, with the message as the body.

So limits, keys, metrics, traces and errors are those of every other request.  :data:`app.grpc.CODES` gives the code of
an error; ``retry-after`` and ``traceresponse`` are sent as trailing metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
import orjson
from starlette.types import ASGIApp, Message

from app.grpc import CODES
from app.grpc.messages import METHODS, PREFIX
from app.grpc.methods import SMALL_SECONDS
from app.grpc.places import Places
from app.service import Service
from psc_core.errors import UsageError

# The metadata of a call that become headers of its request.
_PASSED_ON: Final = frozenset({"authorization", "x-api-key", "traceparent", "tracestate"})

_SMALL_AT_ONCE: Final = 16  # the number of messages without images that may arrive at once

logger = logging.getLogger("psc.grpc")


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
            ("grpc.so_reuseport", int(settings.workers > 1)),
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
        host = context.peer().rpartition(":")[0]  # Without the port: a client's connections share its places.
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
            "client": (context.peer(), 0),
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
            await context.abort(grpc.StatusCode[CODES.get(status, "UNKNOWN")], detail)
        return bytes(body)
