"""Several processes: fronts that answer HTTP (:mod:`app.front`), and one engine with the models, which answers them.

::

    clients ─▶ front, front, … ─▶ engine: the application, its models, metrics and logs
                      └── forks of one parent, which replaces what dies ──┘

The fronts share the listening socket.  The sockets and the memory between them and the engine belong to the parent, so
a new front finds the engine, and a new engine the fronts.  What dies is replaced, and so is what does not move for
:data:`HANG_SECONDS`; but an engine that has never been ready ends the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import uvloop
from fastapi import FastAPI, Response
from starlette.types import Message, Scope

from app.channel import ANSWER, CALL, END, HELLO, LEFT, MODELS, MORE, NEXT, PIECE, WANT, Arena, Board, Channel, Place
from app.errors import RefusedByFront, error_response
from app.front import Front, Taken
from app.http.body import GIVEN
from app.http.middleware import check_count, note_request, own_headers
from app.http.model import predict_images
from app.inference.decoder import DecodedImages
from app.main import create_app, linger_seconds, prepare_process
from app.server import FIRST_REQUEST_SECONDS, LastAccepting, UvicornHost, uvicorn_config
from app.service import SWEEP_SECONDS, ApiKeys, Service, memory_for
from app.settings import Settings
from app.tracing import current_trace, trace_of_request
from psc_core.errors import ExitCode, PSCError
from psc_core.images.preprocess import Preprocess

logger = logging.getLogger("psc.server")

HANG_SECONDS: Final = 120.0  # the time after which a process that does not move is replaced
_PAUSE_SECONDS: Final = 1.0  # the shortest time between two starts of one process
_LOOK_SECONDS: Final = 1.0  # the time between two looks at the processes while nothing happens
_STOPPED_SECONDS: Final = 3.0  # the time between two looks after which the parent itself was stopped
_END: Final = signal.SIGUSR1  # tells the engine that every front has ended


class _Call:
    """A request of a front, which the application answers as if the client were connected here."""

    def __init__(self, channel: Channel, number: int, scope: Scope) -> None:
        self._channel = channel
        self._number = number
        self._scope = scope
        self._is_read = self.has_images = GIVEN in scope  # whether the whole body was read, by the front
        self.task: asyncio.Task[None] | None = None
        self._is_wanted = False  # whether the front was asked for a piece that has not come
        self._pieces: deque[tuple[Any, ...]] = deque()  # each some bytes, and whether there are more
        self.has_left = self._is_passed = self._is_complete = False
        self._changed = asyncio.Event()
        self._start: tuple[int, list[tuple[bytes, bytes]]] | None = None

    async def run(self, app: FastAPI) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as error:  # After the answer has begun; before, the application turns it into one.
            logger.debug("a request failed while it was answered", exc_info=error)
        finally:
            if not self._is_complete:
                self._channel.send(END, self._number)

    def take(self, kind: int, *parts: Any) -> None:
        """Take note of a message of the front."""
        if kind == PIECE:
            self._is_wanted = False
            self._pieces.append(parts)
        self._is_passed |= kind == NEXT
        self.has_left |= kind == LEFT
        self._changed.set()

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _receive(self) -> Message:
        if not self._is_read:
            if not self._pieces and not self._is_wanted:
                self._is_wanted = True
                self._channel.send(WANT, self._number)
            await self._until(lambda: self._pieces or self.has_left)
            if self._pieces:
                body, has_more = self._pieces.popleft()
                self._is_read = not has_more
                return {"type": "http.request", "body": body, "more_body": has_more}
        await self._until(lambda: self.has_left)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
            return
        body, has_more = bytes(message.get("body", b"")), message.get("more_body", False)
        if self._start is not None:
            self._channel.send(ANSWER, self._number, *self._start, body, has_more)
            self._start = None
        else:
            self._channel.send(MORE, self._number, body, has_more)
        self._is_complete = not has_more
        if has_more:
            await self._until(lambda: self._is_passed or self.has_left)
            self._is_passed = False


class FrontCalls:
    """The requests of one front."""

    def __init__(self, app: FastAPI, place: Place, number: int) -> None:
        self._app = app
        self._service: Service = app.state.service
        self._number = number  # of this engine
        self._arena = Arena(place.memory)
        self._calls: dict[int, _Call] = {}
        self._told: object = None
        self._channel = Channel(place.engine, self._on_message)

    def tell(self, models: list[tuple[str, str, dict[str, Any]]], full: list[str]) -> None:
        """Tell the front which models are served, and which of them have no room; again only if that has changed."""
        if self._told != (models, full):
            self._told = models, full
            self._channel.send(MODELS, self._number, models, full)

    def close(self) -> None:
        self._channel.close()

    def _on_message(self, message: tuple[Any, ...]) -> None:
        kind, *parts = message
        if kind == HELLO:  # Nobody waits for the answers to earlier requests any more.
            self._told = None
            for each in self._calls.values():
                each.take(LEFT)
                if each.has_images and each.task is not None:  # At once: the new front may write where they are.
                    each.task.cancel()
        elif kind == CALL:
            self._begin(*parts)
        elif (call := self._calls.get(parts[0])) is not None:
            call.take(kind, *parts[1:])

    def _begin(
        self,
        number: int,
        engine: int,
        about: Scope,
        headers: list[tuple[bytes, bytes]],
        began: float,
        taken: tuple[Any, ...] | None,
        refused: tuple[dict[str, Any], dict[str, str]] | None,
    ) -> None:
        if engine != self._number:  # It was meant for an engine that has died, and nobody waits for the answer.
            return
        scope = {**about, "headers": headers, "state": {}, "asgi": {"version": "3.0"}, "began": began}
        if refused is not None:
            scope[GIVEN] = RefusedByFront(*refused)
        given = None if taken is None else Taken(*taken)
        if given is not None:
            scope[GIVEN] = self._images(given)
        self._calls[number] = call = _Call(self._channel, number, scope)
        is_direct = given is not None and not self._needs_layers(headers)
        work = self._predict(number, scope, given, call) if is_direct and given else call.run(self._app)
        call.task = asyncio.get_running_loop().create_task(work)
        call.task.add_done_callback(lambda _: self._calls.pop(number))

    async def _predict(self, number: int, scope: Scope, taken: Taken, call: _Call) -> None:
        """Answer a prediction as the application would, without the layers that only others need."""
        service, trace = self._service, trace_of_request(scope["headers"])
        token = current_trace.set(trace)
        service.inflight += 1

        async def read(*_: object) -> DecodedImages:
            images: DecodedImages = scope[GIVEN]
            return images

        try:
            check_count(service)
            body = await predict_images(service, taken.name, taken.query, read, lambda: call.has_left)
            response = Response(body, media_type="application/json")
        except Exception as error:
            response = error_response(error, scope, service.metrics)
        finally:
            service.inflight -= 1
        headers = [*response.raw_headers, *own_headers(service, trace)]
        self._channel.send(ANSWER, number, response.status_code, headers, bytes(response.body), False)
        route = "/predict" if taken.name is None else "/models/{name}/predict"
        note_request(service, scope, route, response.status_code, scope["began"])
        current_trace.reset(token)

    def _needs_layers(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Return whether a prediction needs more of the application than :meth:`_predict`."""
        settings = self._service.settings
        if settings.otel or settings.allowed_hosts or settings.access_log:  # The last: a proxy may name the client.
            return True
        return bool(settings.cors_origins) and any(name == b"origin" for name, _ in headers)

    def _images(self, taken: Taken) -> DecodedImages:
        pixels = self._arena.images_at(taken.at, taken.shape)
        place, files = taken.at + pixels.nbytes, []
        for size, name, _ in taken.files:
            files.append((self._arena.bytes_at(place, size), name))
            place += size
        marks = [mark for _, _, mark in taken.files]
        return DecodedImages(pixels, files, marks, taken.version, began=taken.began, seconds=taken.seconds)


class EngineHost(UvicornHost):
    """The process of the engine."""

    def __init__(self, address: str, began: float, keys: ApiKeys, lifeline: int, board: Board) -> None:
        super().__init__(address, began)
        self._keys = keys
        self._board = board
        self._number = board.engine
        self._lifeline = lifeline  # a file that can be read once the parent has ended
        self.ended = asyncio.Event()

    def models_loaded(self, service: Service) -> None:
        self._board.set_ready(self._number)  # Before any answer says so: an engine that ends after it is replaced.
        super().models_loaded(service)

    def keys(self, settings: Settings) -> ApiKeys:
        return self._keys

    def board(self, models: int) -> Board:
        return self._board

    def failed(self) -> None:
        self.ended.set()

    @contextlib.contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """Reload on SIGHUP, drain on SIGTERM, and end when the parent says that no front is left, or has ended.

        If SIGTERM came from somebody else, the parent says nothing: the engine ends when fronts would, and is replaced.
        """
        loop = asyncio.get_running_loop()

        async def end_alone() -> None:
            service.begin_drain()
            await asyncio.sleep(linger_seconds(service.settings) + FIRST_REQUEST_SECONDS)
            while service.inflight and service.answer_seconds_left():
                await asyncio.sleep(SWEEP_SECONDS)
            self.ended.set()

        def orphaned() -> None:
            loop.remove_reader(self._lifeline)
            self.begin(end_alone())

        def drain() -> None:
            service.begin_drain()
            seconds = service.settings.answer_seconds
            loop.call_later(max(seconds, linger_seconds(service.settings) + FIRST_REQUEST_SECONDS), self.ended.set)

        loop.add_signal_handler(signal.SIGHUP, lambda: self.begin(service.reload_quietly()))
        loop.add_signal_handler(signal.SIGTERM, drain)
        loop.add_signal_handler(_END, self.ended.set)
        loop.add_reader(self._lifeline, orphaned)
        gc.disable()  # Until the models are loaded: collections would walk what libraries make, which is no garbage.
        try:
            yield
        finally:
            gc.enable()


async def _answer_fronts(settings: Settings, host: EngineHost, board: Board, places: Sequence[Place]) -> Service:
    """Run the application until the engine is to end; return its service, which says why."""
    number = board.engine
    app = create_app(settings, host=host)
    service: Service = app.state.service
    fronts: list[FrontCalls] = []

    async def tell() -> None:
        while True:
            board.beats[-1] = time.monotonic()
            models, full = _models(service)
            for front in fronts:
                front.tell(models, full)
            await asyncio.sleep(SWEEP_SECONDS)

    async with app.router.lifespan_context(app):
        fronts = [FrontCalls(app, place, number) for place in places]
        telling = asyncio.create_task(tell())
        await host.ended.wait()
    telling.cancel()
    for front in fronts:
        front.close()
    return service


def _models(service: Service) -> tuple[list[tuple[str, str, dict[str, Any]]], list[str]]:
    """Return name, version and preprocessing of each model, and the names of those that would refuse an image."""
    models: list[tuple[str, str, dict[str, Any]]] = []
    full: list[str] = []
    served = {each.name: each for each in service.registry.served}
    for name in service.registry.names:
        if (each := served.get(name)) is None:
            models.append((name, "", {}))
            continue
        preprocess = each.model.preprocess
        # Only the engine has the code of a preprocessing of its own.
        models.append((name, each.model.version, asdict(preprocess) if type(preprocess) is Preprocess else {}))
        try:
            service.memory.check(0)
            each.engine.check_room()
        except PSCError:
            full.append(name)
    return models, full


class Processes:
    """The parent of fronts and engine; create and run it in a process without threads."""

    def __init__(self, settings: Settings, listener: socket.socket, address: str, began: float) -> None:
        self._settings = settings
        self._listener = listener
        self._address = address
        self._began = began
        self._keys = ApiKeys.of(settings)  # Once: a file that changes meanwhile must not divide the processes.
        fronts = settings.fronts
        self._board = Board(fronts, len(settings.named_bundles))
        # As much as requests may hold in one process, so that the largest one finds room; untouched, it takes none.
        size = memory_for(settings, self._board).total
        self._places = [Place.make(index, size) for index in range(fronts)]
        self._lifeline, self._alive = os.pipe()
        self._woken, self._waker = socket.socketpair()
        self._context = multiprocessing.get_context("fork")
        self._children: dict[int, BaseProcess] = {}  # by their place on the board; the engine's is the last
        self._started: dict[int, float] = {}
        self._told = 0  # how often the service was told to end
        self._looked = time.monotonic()  # when this process last looked at the others
        self._continued = 0.0  # when it last went on after it was stopped

    def run(self) -> tuple[int, str]:
        """Serve until told to end; return the exit code, and the reason in one line if it is not 0."""
        with self._signals():
            for place in (self._board.fronts, *range(self._board.fronts)):
                self._start(place)
            code, message = 0, ""
            try:
                while not self._told and not code:
                    self._wait(_LOOK_SECONDS)
                    if not self._told:  # Or the others have got the signal too, and have ended.
                        code, message = self._replace_dead()
            finally:
                self._drain()
        return code, message

    def _start(self, place: int) -> None:
        is_engine = place == self._board.fronts
        work = self._run_engine if is_engine else self._run_front
        name = "engine" if is_engine else f"front-{place}"
        child = self._context.Process(target=self._run, args=(work, place), name=name, daemon=False)
        self._children[place], self._started[place] = child, time.monotonic()
        self._board.memory[place] = 0
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Until the child has a handler of its own.
        child.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _run(self, work: Callable[[int], int], place: int) -> None:
        """Run a child."""
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(f"psc-{self._children[place].name}")  # Which ps and top show.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.OK))  # Until it is prepared.
        for number in (signal.SIGINT, signal.SIGHUP, _END):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(self._alive)
        for end in (self._woken, self._waker):
            end.close()
        prepare_process(self._settings)
        try:
            code = work(place)
        except PSCError as error:
            logger.critical("%s", error)
            code = ExitCode.BAD_INPUT
        sys.exit(code)

    def _run_engine(self, _: int) -> int:
        self._listener.close()
        for place in self._places:
            place.front.close()

        async def run() -> Service:
            host = EngineHost(self._address, self._began, self._keys, self._lifeline, self._board)
            return await _answer_fronts(self._settings, host, self._board, self._places)

        try:
            service = uvloop.run(run())
        except PSCError as error:
            self._board.set_reason(str(error))
            return ExitCode.BAD_INPUT
        self._board.set_reason(service.exit_message)
        return service.exit_code

    def _run_front(self, index: int) -> int:
        own = self._places[index]
        for place in self._places:
            place.engine.close()
            if place is not own:
                place.front.close()

        def end_later() -> None:
            """Let uvicorn end a moment after SIGTERM, or after the parent has ended; see :class:`.UvicornHost`."""
            loop = asyncio.get_running_loop()
            end = signal.getsignal(signal.SIGTERM)

            def drain() -> None:
                front.stop_waiting()
                loop.remove_reader(self._lifeline)
                if callable(end):
                    loop.call_later(linger_seconds(self._settings), end, signal.SIGTERM, None)

            def orphaned() -> None:
                front.is_orphan = True
                drain()

            loop.add_signal_handler(signal.SIGTERM, drain)
            loop.add_signal_handler(signal.SIGINT, lambda: None)  # The parent answers Ctrl-C with SIGTERM.
            loop.add_reader(self._lifeline, orphaned)
            if server.should_exit:  # The signal came before.
                front.stop_waiting()

        front = Front(self._settings, self._keys, self._board, own, on_start=end_later)
        server = LastAccepting(uvicorn_config(self._settings, lambda: front))
        # Until uvicorn has its own: an exception within the loop, as before, would end the process with a traceback.
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        with contextlib.suppress(SystemExit):  # The application could not start.
            server.run([self._listener])
        return ExitCode.OK if server.started else ExitCode.FAILURE

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def tell(*_: object) -> None:
            self._told += 1

        def reload(*_: object) -> None:
            self._send(self._board.fronts, signal.SIGHUP)

        self._waker.setblocking(False)
        handlers: Mapping[int, Any] = {signal.SIGTERM: tell, signal.SIGINT: tell, signal.SIGHUP: reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        signal.set_wakeup_fd(self._waker.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait(self, seconds: float) -> None:
        """Wait until a child ends, a signal comes, or the time is over; not so long while one is dead already."""
        living = [each.sentinel for each in self._children.values() if each.is_alive()]
        ready = wait([self._woken, *living], seconds if len(living) == len(self._children) else SWEEP_SECONDS)
        if self._woken in ready:
            self._woken.recv(64)

    def _send(self, place: int, number: int) -> None:
        child = self._children[place]
        if child.pid is not None and child.is_alive():
            os.kill(child.pid, number)

    def _replace_dead(self) -> tuple[int, str]:
        """Replace the processes that have died; return a code and a reason if the service has to end instead."""
        engine, now = self._board.fronts, time.monotonic()
        if now > self._looked + _STOPPED_SECONDS:  # This process was, and so were the others: docker pause.
            self._continued = now
        self._looked = now
        for place, child in list(self._children.items()):
            now = time.monotonic()
            if child.is_alive():
                moved = max(self._started[place], self._board.beats[place], self._continued)
                if now > moved + HANG_SECONDS:
                    logger.critical("%s has not moved for %g s and is killed", child.name, HANG_SECONDS)
                    child.kill()
                continue
            code = child.exitcode or 0
            if place == engine and self._board.ready_engine != self._board.engine:
                if code > 0:
                    return code, self._board.reason or "the engine could not start; see the log"
                by = f" by {signal.Signals(-code).name}" if code else ""
                return ExitCode.FAILURE, f"the engine was ended{by} before it was ready"
            if code > 0 and place != engine and self._board.beats[place] < self._started[place]:
                return code, "a front could not start; see the log"
            if now < self._started[place] + _PAUSE_SECONDS:
                continue
            reason = f": {self._board.reason}" if place == engine and code > 0 else ""
            logger.error("%s has ended (%d) and is replaced%s", child.name, code, reason)
            if place == engine:
                self._board.engine += 1
            else:
                self._board.forget(place)
            self._start(place)
        return 0, ""

    def _drain(self) -> None:
        """End the fronts, which answer what they have, and then the engine; a second signal waits for no client."""
        engine, began = self._board.fronts, time.monotonic()
        self._listener.close()  # It would go on accepting connections that nobody answers.
        for place in self._children:
            self._send(place, signal.SIGTERM)
        told = self._told

        def end(places: Sequence[int], within_s: float) -> None:
            while any(self._children[each].is_alive() for each in places):
                if time.monotonic() > began + within_s or self._told > told:
                    for each in places:
                        self._children[each].kill()
                if not self._children[engine].is_alive():  # So that the fronts do not wait for its answers.
                    self._board.engine = self._board.ready_engine + 1
                self._wait(SWEEP_SECONDS)

        seconds = self._settings.drain_seconds
        end(range(engine), max(seconds, linger_seconds(self._settings) + FIRST_REQUEST_SECONDS))
        self._send(engine, _END)
        told = self._told
        end([engine], seconds + HANG_SECONDS)
