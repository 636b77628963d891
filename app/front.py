"""A front: a process that answers HTTP for the engine, with uvicorn and no model.

It reads and decodes the images of ``POST /predict`` itself, into memory that the engine sees, and passes the request
on.  The engine runs the application (:mod:`app.main`) for it as if the client were connected there, so everything but
those images is the engine's: keys, errors, decisions, metrics, logs and every other route.  While there is no engine,
the front answers 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.channel import ANSWER, CALL, END, HELLO, LEFT, MODELS, NEXT, PIECE, WANT, Arena, Board, Channel, Place
from app.errors import (
    DeadlineExceeded,
    EngineLost,
    QueueFull,
    TooManyRequests,
    Unauthorized,
    problem_of,
    problem_response,
)
from app.http.body import has_disconnected, parse_query, read_images
from app.http.middleware import MODEL_READY, ProblemCORS, RequestLimits, announced_bytes
from app.http.model import QUERY, ReadyDocument
from app.http.v2 import ModelReadyDocument, ServerReadyDocument
from app.inference.decoder import Decoder, EncodedImage, fingerprints
from app.memory import COPIES, PIXEL_BYTES, MemoryBudget, process_memory, resident_bytes
from app.metrics import DescriptorWatch
from app.service import SWEEP_SECONDS, ApiKeys
from app.settings import Settings
from app.tracing import current_trace, trace_of_request
from psc_core.allocator import release_freed_memory
from psc_core.errors import PSCError
from psc_core.images.preprocess import Preprocess

logger = logging.getLogger("psc.front")

_PREDICT: Final = re.compile(r"/predict|/models/([^/]+)/predict")
_RELEASE_BYTES: Final = 16 << 20  # beyond what a front began with, for freed memory to go back to the system
_RELEASE_SECONDS: Final = 5.0  # the shortest time between two such returns
_SILENT_SECONDS: Final = 5.0  # after which an engine that nobody would replace counts as dead
_MEET_SECONDS: Final = 10.0  # the longest time that a new front waits for the engine before it answers without
_TRACE: Final = b"traceparent"
# What says that the process is alive, and what says that it is not ready, by path.
_ALIVE: Final = {"/healthz": b'{"status":"ok"}', "/v2/health/live": b'{"live":true}'}
_NOT_READY: Final = {
    "/readyz": ReadyDocument(status="not ready", reasons={"service": "the engine is being replaced"}),
    "/v2/health/ready": ServerReadyDocument(live=True, ready=False),
}
# What the engine needs to know of a request.
_PASSED_ON: Final = (
    "type", "http_version", "server", "client", "scheme", "method", "root_path", "path", "raw_path", "query_string",
)  # fmt: skip


class Taken(NamedTuple):
    """The images of a request as a front hands them to the engine; it can be marshalled as a plain tuple."""

    name: str | None  # of the model that was asked for; None for the default one
    version: str  # of the model for which they are decoded
    shape: tuple[int, ...]
    at: int  # where the pixels begin in the memory of the front, and behind them the files
    files: tuple[tuple[int, str | None, int], ...]  # the size, name and fingerprint of each file
    query: dict[str, Any]  # the parameters of the request
    began: float  # when the whole body had come, by the monotonic clock
    seconds: float  # the time in which the images were decoded


class DecodingModel(NamedTuple):
    """A model for which a front decodes images."""

    version: str
    decoder: Decoder
    has_room: bool  # whether the engine would admit an image now


@dataclass(eq=False)
class _Call:
    """A request that the engine answers."""

    number: int
    engine: int  # the number of the engine that was asked
    receive: Receive
    messages: asyncio.Queue[tuple[Any, ...]] = field(default_factory=asyncio.Queue)  # from the engine
    has_left: bool = False  # whether the engine knows that the client has left
    is_read: bool = False  # whether the whole body was read


def front_memory(settings: Settings, board: Board, place: int) -> MemoryBudget:
    """Return a front's part of the memory for requests, at least that of the largest one if there is so much.

    It may hold as much again in the memory that it shares with the engine, see :class:`.Arena`.
    """
    largest = COPIES * settings.max_body_bytes + PIXEL_BYTES * settings.max_pixels
    asked = max(settings.max_buffered_bytes // board.fronts, min(settings.max_buffered_bytes, largest))
    most = process_memory() // (2 * board.fronts)
    return MemoryBudget(asked, most, max_pixels=settings.max_pixels, counts=board.memory, place=place)


class Front:
    """The application that uvicorn runs in a front."""

    def __init__(
        self, settings: Settings, keys: ApiKeys, board: Board, place: Place, *, on_start: Callable[[], None]
    ) -> None:
        self.settings = settings
        self.inflight = 0
        self.memory = front_memory(settings, board, place.index)
        self._keys = keys
        self._board, self._place = board, place
        self._on_start = on_start
        self._arena = Arena(place.memory, self.memory.total)
        self._parser = ThreadPoolExecutor(1, "psc-parse")
        # Twice its share: connections spread unevenly, and a batch waits for the front that has most of them.
        self._decoders = ThreadPoolExecutor(max(1, 2 * settings.decoders // board.fronts), "psc-decode")
        self._limits = RequestLimits(self._take, service=self)
        origins = settings.cors_origins
        self._alone = ProblemCORS(self._answer_alone, origins=origins) if origins else self._answer_alone
        self._numbers = itertools.count(os.getpid() << 32)
        self._calls: dict[int, _Call] = {}
        self._models: dict[str, DecodingModel] = {}
        self._default = ""
        self._engine = -1  # the number of the engine that has told its models
        self._met = asyncio.Event()  # set once this front knows an engine, or is to end
        self._decoding = 0  # the number of images that are being decoded, or wait for a thread
        self._prefix = settings.root_path.rstrip("/")
        self.is_orphan = False  # whether the parent has ended, so that nobody replaces the engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._engine != self._board.engine:
            await self._alone(scope, receive, send)
            return
        state: dict[str, Any] = {"began": time.perf_counter()}
        scope["state"] = state
        # A body that may be too large for this front's part of the memory is left to the engine, which reads pieces.
        if self._to_predict(scope) is not None and self._longest_body(scope) <= self.memory.largest_body:
            try:
                await self._limits(scope, receive, send)
            except Exception as error:
                state["refused"] = _refusal(error, scope)
        try:
            await self._ask(scope, receive, send)
        finally:
            self._give_back(state)

    def stop_waiting(self) -> None:
        """Wait no longer for an engine."""
        self._met.set()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Open the channel, and keep it until uvicorn ends."""
        await receive()
        self._channel = Channel(self._place.front, self._on_message)
        self._channel.send(HELLO)
        sweeping = asyncio.get_running_loop().create_task(self._sweep())
        self._on_start()
        with contextlib.suppress(TimeoutError):  # Or the first clients would hear that there is no engine.
            await asyncio.wait_for(self._met.wait(), _MEET_SECONDS)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        sweeping.cancel()
        self._channel.close()
        for pool in (self._parser, self._decoders):
            pool.shutdown(wait=False, cancel_futures=True)
        await send({"type": "lifespan.shutdown.complete"})

    def _to_predict(self, scope: Scope) -> tuple[str | None, DecodingModel] | None:
        """Return name and model of a prediction that the engine would admit; None for any other request."""
        found = _PREDICT.fullmatch(scope["path"].removeprefix(self._prefix)) if scope["method"] == "POST" else None
        model = None if found is None else self._models.get(found[1] or self._default)
        if found is None or model is None or not model.has_room:
            return None
        if self._keys.predict:
            try:
                self._keys.check("predict", Headers(scope=scope))
            except Unauthorized:
                return None
        return found[1], model

    def _longest_body(self, scope: Scope) -> int:
        """Return how many bytes the body of a request may have, as far as its head says."""
        is_chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        return self.settings.max_body_bytes if is_chunked else announced_bytes(scope["headers"])

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and decode the images of a prediction into the memory that the engine sees."""
        request = Request(scope, receive)
        query = parse_query(QUERY, request).model_dump(exclude_none=True)
        images = await read_images(request, self.settings, self._parser)
        began = time.monotonic()  # Not before: a slow upload is limited by ``upload_seconds``.
        found = self._to_predict(scope)
        if found is None:  # It has gone, or is full, since the head was read.
            raise QueueFull("the queue has no room; try again in 1 s", retry_after=1)
        name, model = found
        marks = await fingerprints(images)
        shape = (len(images), *model.decoder.shape)
        pixels = math.prod(shape)
        at = self._arena.take(pixels + sum(len(image.data) for image in images))
        if at is None:
            raise TooManyRequests("the memory for images is full; try again in 1 s", retry_after=1)
        try:
            start = time.monotonic()
            await self._decode(model.decoder, images, self._arena.images_at(at, shape), began)
            place = at + pixels
            for image in images:
                self._arena.bytes_at(place, len(image.data))[:] = image.data
                place += len(image.data)
            files = tuple((len(each.data), each.name, mark) for each, mark in zip(images, marks, strict=True))
            scope["state"]["taken"] = Taken(
                name, model.version, shape, at, files, query, began, time.monotonic() - start
            )
        except Exception:  # Not if cancelled: decode threads may still write there, and this process is about to end.
            self._arena.give(at)
            raise

    async def _decode(
        self, decoder: Decoder, images: Sequence[EncodedImage], into: np.ndarray[Any, Any], began: float
    ) -> None:
        deadline = began + self.settings.deadline_seconds
        if self._decoding + len(images) > self.settings.max_queue_images:
            raise QueueFull(f"{self._decoding} images wait to be decoded; try again in 1 s", retry_after=1)
        if decoder.decode_now(images, into) is not None:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Exception | None] = loop.create_future()
        self._decoding += len(images)
        self._board.decoding[self._place.index] += 1
        decoder.decode_later(
            images,
            into,
            is_wanted=lambda: time.monotonic() < deadline,
            on_done=lambda _, error: loop.call_soon_threadsafe(done.set_result, error),
        )
        try:
            error = await done
        finally:
            self._decoding -= len(images)
            self._board.decoding[self._place.index] -= 1
        if error is not None:
            raise error
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"deadline exceeded after {self.settings.deadline_seconds:.3g} s; try again")

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the engine answer a request, and send its answer on."""
        state = scope["state"]
        taken, refused = state.get("taken"), state.get("refused")
        call = _Call(next(self._numbers), self._engine, receive, is_read=taken is not None)
        self._calls[call.number] = call
        about = {name: scope[name] for name in _PASSED_ON if name in scope}
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        reading: asyncio.Task[None] | None = None
        has_begun = False
        try:
            known = state["began"], taken and tuple(taken), refused
            self._channel.send(CALL, call.number, self._engine, about, headers, *known)
            while True:
                kind, *parts = await call.messages.get()
                if kind == WANT:
                    reading = asyncio.get_running_loop().create_task(self._pass_piece(call))
                    continue
                if kind == END:
                    if not has_begun:
                        await self._alone(scope, receive, send)
                    return  # Without the rest of the answer, uvicorn closes the connection.
                if kind == ANSWER:
                    status, given, *parts = parts
                    has_begun = True
                    self._give_back(state)  # Now and not when the client has read the answer, which may take long.
                    await send({"type": "http.response.start", "status": status, "headers": given})
                body, has_more = parts
                await send({"type": "http.response.body", "body": body, "more_body": has_more})
                if not has_more:
                    return
                self._channel.send(NEXT, call.number)
        finally:
            del self._calls[call.number]
            if reading is not None:
                reading.cancel()

    def _give_back(self, state: dict[str, Any]) -> None:
        """Give back the place of a request's images, if it has one."""
        if (taken := state.pop("taken", None)) is not None:
            self._arena.give(taken.at)

    async def _pass_piece(self, call: _Call) -> None:
        """Pass on the next piece of a body that the engine has asked for."""
        message = await call.receive()
        if message["type"] == "http.disconnect":
            self._say_left(call)
            return
        call.is_read = not message.get("more_body", False)
        self._channel.send(PIECE, call.number, bytes(message.get("body", b"")), not call.is_read)

    def _say_left(self, call: _Call) -> None:
        if not call.has_left:
            call.has_left = True
            self._channel.send(LEFT, call.number)

    async def _answer_alone(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer while there is no engine: this process is alive, but predicts nothing."""
        path = scope["path"].removeprefix(self._prefix)
        alive, of_model = _ALIVE.get(path), MODEL_READY.fullmatch(path)
        not_ready = ModelReadyDocument(name=of_model[1], ready=False) if of_model else _NOT_READY.get(path)
        trace = {"traceresponse": trace_of_request(scope["headers"])}
        if alive is not None:
            response = Response(alive, headers=trace, media_type="application/json")
        elif not_ready is not None:
            response = Response(not_ready.model_dump_json(), 503, trace, media_type="application/json")
        else:
            error = EngineLost("the engine that predicts is being replaced; try again in 5 s", retry_after=5)
            problem, headers = problem_of(error)
            response = problem_response(problem, headers | trace, {**scope, "root_path": self._prefix}, None)
        await response(scope, receive, send)

    def _on_message(self, message: tuple[Any, ...]) -> None:
        kind, subject, *parts = message
        if kind == MODELS:
            self._know(subject, *parts)
        elif (call := self._calls.get(subject)) is not None:  # Otherwise the request has ended here.
            call.messages.put_nowait((kind, *parts))

    def _know(self, engine: int, models: list[tuple[str, str, dict[str, Any]]], full: list[str]) -> None:
        """Take note of an engine, of its models, and of those that have no room."""
        if engine != self._board.engine:  # One that has died meanwhile.
            return
        self._engine = engine
        self._met.set()
        self._lose_dead()
        known, self._models = self._models, {}
        self._default = models[0][0] if models else ""
        for name, version, about in models:
            if not about:  # A model that is not loaded, or whose images only the engine can decode.
                continue
            before = known.get(name)
            if before is not None and before.version == version:
                decoder = before.decoder
            else:
                decoder = Decoder(self._decoders, self.memory, Preprocess(**about), self.settings)
            self._models[name] = DecodingModel(version, decoder, name not in full)

    def _lose_dead(self) -> None:
        """End the requests to an engine that has died; without a parent only its silence tells."""
        is_silent = self.is_orphan and time.monotonic() > self._board.beats[-1] + _SILENT_SECONDS
        for call in self._calls.values():
            if is_silent or call.engine != self._board.engine:
                call.messages.put_nowait((END,))

    async def _sweep(self) -> None:
        """Now and then, notice that the engine has died or that clients have left, and say that this one is alive."""
        board, index = self._board, self._place.index
        began_with, released_at, grown = resident_bytes(), time.monotonic(), 0
        descriptors = DescriptorWatch()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            board.beats[index] = time.monotonic()
            board.arriving[index] = self.inflight
            try:
                self._lose_dead()
                for call in list(self._calls.values()):
                    if call.is_read and has_disconnected(call.receive):
                        self._say_left(call)
                descriptors.check()
                with contextlib.suppress(OSError):  # No file descriptor is free, so the last measure stands.
                    grown = resident_bytes() - began_with
                board.grown[index] = max(0, grown)
                if grown > _RELEASE_BYTES and not self.inflight and time.monotonic() > released_at + _RELEASE_SECONDS:
                    released_at = time.monotonic()
                    self._arena.release()
                    await asyncio.to_thread(release_freed_memory)
            except Exception:
                logger.exception("sweep failed")


def _refusal(error: Exception, scope: Scope) -> tuple[Any, ...]:
    """Return the answer to a request that this front has refused, for the engine to give and count."""
    problem, headers = problem_of(error)
    if problem.status >= 500 and not isinstance(error, PSCError):
        trace, others = trace_of_request(scope["headers"]), [each for each in scope["headers"] if each[0] != _TRACE]
        scope["headers"] = [*others, (_TRACE, trace.encode())]  # The engine continues it with its answer.
        token = current_trace.set(trace)
        logger.error("a request failed in a front", exc_info=error)
        current_trace.reset(token)
    return problem.model_dump(exclude_none=True), headers
