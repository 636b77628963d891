"""The service, which all routes find at ``app.state.service``: settings, models, metrics, keys and shutdown.

Keys are kept as SHA-256 digests, and a given key is compared with each of them in constant time, so neither the time
nor a memory dump tells how close a guess was.  No key is ever written to a log or an error message.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar, cast, get_args

from pydantic import SecretStr
from starlette.requests import Request

from app.channel import Board
from app.errors import DeadlineExceeded, Forbidden, LogUnavailable, Unauthorized
from app.log import LogWriter
from app.memory import MemoryBudget, process_memory
from app.metrics import DescriptorWatch, Metrics, record_gpu
from app.models import ModelStarter, Registry, load_bundle
from app.settings import Settings
from psc_core.allocator import release_freed_memory
from psc_core.errors import DataError, DeviceError, ExitCode, PSCError, UsageError
from psc_core.log.store import open_to_write
from psc_core.model import FittedModel

logger = logging.getLogger("psc.service")

Found = TypeVar("Found")
Role = Literal["predict", "admin", "feedback"]
# The seconds between two checks of deadlines, clients, models, recorded predictions, memory, file descriptors.
SWEEP_SECONDS: Final = 0.05


@dataclass(frozen=True, repr=False)
class ApiKeys:
    """The digests of the keys of each role; an admin key may also predict and give feedback."""

    predict: frozenset[bytes]  # empty if anyone may predict
    admin: frozenset[bytes]  # empty if administration is off
    feedback: frozenset[bytes]  # empty if feedback is off

    def __repr__(self) -> str:
        return f"ApiKeys({', '.join(f'{role}={len(getattr(self, role))} keys' for role in get_args(Role))})"

    @classmethod
    def of(cls, settings: Settings) -> ApiKeys:
        """Keep the digests of the keys in the settings and the files that they name."""
        predict = _digests(settings.api_keys, settings.api_keys_file)
        admin = _digests(settings.admin_keys, settings.admin_keys_file)
        feedback = _digests(settings.feedback_keys, settings.feedback_keys_file)
        return cls(predict and predict | admin, admin, feedback | admin)

    def check(self, role: Role, headers: Mapping[str, str]) -> None:
        """Check that a request has a key of this role; without configured keys every request may predict."""
        digests: frozenset[bytes] = getattr(self, role)
        if not digests:
            if role == "predict":
                return
            raise Forbidden(f"no {role} keys are configured; set PSC_{role.upper()}_KEYS")
        key = headers.get("x-api-key")
        if key is None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            key = token.strip() if scheme.lower() == "bearer" else ""
            if not key:
                raise Unauthorized("this needs an API key; send it as X-API-Key or Authorization: Bearer")
        given = _digest(key)
        # A sum and not any(), which would stop at the match, and whose time would reveal which key it was.
        if not sum(hmac.compare_digest(given, digest) for digest in digests):
            raise Unauthorized("the API key is not accepted here; ask the operator for one")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digests(keys: Iterable[SecretStr], file: Path | None) -> frozenset[bytes]:
    found = [key.get_secret_value() for key in keys] + ([] if file is None else _keys_in(file))
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in found):
        raise UsageError(
            "API keys must be printable ASCII without spaces; generate one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return frozenset(map(_digest, found))


def _keys_in(path: Path) -> list[str]:
    """Return the keys of a file, one per line; blank lines and lines that begin with ``#`` are none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the file of API keys {path} ({type(error).__name__}); check the path and its permissions"
        ) from error
    if not (keys := [line for line in lines if line and not line.startswith("#")]):
        raise UsageError(f"{path} holds no API key; write one key per line")
    return keys


class Host:
    """The process that a service runs in, and what it does for the service; this one, such as a test, does nothing."""

    starts_ready = False  # whether startup waits until every model is ready, and raises what goes wrong on the way

    @contextlib.contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """Enclose the life of the application."""
        yield

    def models_loaded(self, service: Service) -> None:
        """Tell whoever waits that every model answers."""

    def models_changed(self) -> None:
        """React when every model is ready, or when models that a reload replaced have ended."""

    def keys(self, settings: Settings) -> ApiKeys:
        """Return the API keys that requests are checked against."""
        return ApiKeys.of(settings)

    def board(self, models: int) -> Board:
        """Return what the service has in common with the fronts before it; it has none here."""
        return Board(0, models)

    def failed(self) -> None:
        """Replace the process; the service's ``exit_code`` and ``exit_message`` say why."""


def memory_for(settings: Settings, board: Board) -> MemoryBudget:
    """Return the memory that requests may hold in the process with the models, which counts behind the fronts."""
    asked, most, pixels = settings.max_buffered_bytes, process_memory(), settings.max_pixels
    board.memory[-1] = min(board.memory[-1], most)  # until it is measured
    return MemoryBudget(asked, most, max_pixels=pixels, counts=board.memory, place=board.fronts)


class Service:
    """The parts of one service process, none of which runs before :meth:`start`.

    The arguments are those of :func:`app.main.create_app`, and so are the errors.
    """

    def __init__(self, settings: Settings, models: Mapping[str, FittedModel] | None, host: Host) -> None:
        if settings.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            raise UsageError("compile needs a C++ compiler, and none was found; install g++, or leave compile out")
        names = [name for name, _ in settings.named_bundles] if models is None else list(models)
        self.settings, self.host, self.board = settings, host, host.board(len(names))
        self.keys, self.metrics, self.memory = host.keys(settings), Metrics(), memory_for(settings, self.board)
        # The writer of the prediction log; None if predictions are not logged.
        self.log = None if settings.log is None else LogWriter(open_to_write(settings.log), settings, self.metrics)
        # With several models, nobody knows whose images are being decoded elsewhere.
        decoding: Collection[int] = self.board.decoding if len(names) == 1 else ()
        starter = ModelStarter(settings, self.metrics, self.memory, self.log, decoding)
        load = partial(load_bundle, settings) if models is None else models.__getitem__
        seconds, unloaded = settings.deadline_seconds, self.board.unloaded
        self.registry = Registry(names, load, starter, self.metrics, retire_within_s=seconds, unloaded=unloaded)
        self.parser = ThreadPoolExecutor(1, "psc-parse")  # the thread that parses large bodies, one at a time
        self.searcher = ThreadPoolExecutor(1, "psc-feedback")
        self.exit_code: int = ExitCode.OK  # the code with which the process should exit
        self.exit_message = ""  # the reason in one line if the code is not 0
        self.inflight = 0
        self.draining = False
        self._draining_since = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._descriptors = DescriptorWatch()

    async def start(self) -> None:
        """Start the log and begin to load the models; :meth:`reasons` tells when they are ready.

        For a host that starts ready, return only then, and raise what goes wrong.
        """
        open_level = logging.INFO if self.settings.host in ("127.0.0.1", "::1", "localhost") else logging.WARNING
        if not self.keys.predict:
            logger.log(open_level, "API keys are off: anyone who reaches this port may predict (PSC_API_KEYS)")
        if not self.keys.admin:
            logger.log(open_level, "admin keys are off: /admin answers 403 (PSC_ADMIN_KEYS)")
        if self.memory.largest_body < self.settings.max_body_bytes:
            logger.warning(
                "the memory for requests is %d MiB, so bodies of more than %d MiB are refused; raise "
                "PSC_MAX_BUFFERED_BYTES and give the process four times as much memory",
                self.memory.total >> 20,
                self.memory.largest_body >> 20,
            )
        if self.settings.deadline_seconds > self.settings.answer_seconds:
            logger.warning(
                "requests may take %g s, but have only %g s when the service is told to end; raise PSC_DRAIN_SECONDS",
                self.settings.deadline_seconds,
                self.settings.answer_seconds,
            )
        if self.log is not None:
            self.log.start()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._sweep())]
        if self.host.starts_ready:
            try:
                await self.registry.start()
            except PSCError as error:
                logger.critical("%s", error)
                raise
            self.host.models_loaded(self)
            self._tasks.append(loop.create_task(self.registry.settle()))
        else:
            self._tasks.append(loop.create_task(self._load()))

    def reasons(self) -> dict[str, str]:
        """Return why the service is not ready, by model name or ``service``; empty if it is ready."""
        reasons = self.registry.reasons()
        if self.memory.shortage:
            reasons["service"] = self.memory.shortage
        if self.draining:
            reasons["service"] = "draining"
        return reasons

    def begin_drain(self) -> None:
        """Report not ready from now on, and start counting ``drain_seconds``."""
        if not self.draining:
            self.draining = True
            self._draining_since = asyncio.get_running_loop().time()
            logger.info("draining", extra={"inflight": self.inflight})

    def answer_seconds_left(self) -> float:
        """Return how much is left of the time to answer accepted requests, which begins with draining; seconds."""
        return self._left_of(self.settings.answer_seconds)

    async def close(self) -> None:
        """Finish the admitted requests and end all threads."""
        self.begin_drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.registry.close(within_s=self.answer_seconds_left())
        if self.log is not None:
            await self.log.close(within_s=self._left_of(self.settings.drain_seconds))
        for pool in (self.parser, self.searcher):
            pool.shutdown(wait=False, cancel_futures=True)

    async def reload_quietly(self) -> None:
        """Reload every bundle once no other reload is running; a failure is logged and changes nothing."""
        try:
            await self.registry.reload_when_free()
        except Exception as error:
            logger.error("reload failed, the old models stay: %s", error, exc_info=not isinstance(error, PSCError))

    async def search_log(self, work: Callable[[LogWriter], Found]) -> Found:
        """Run ``work`` on the prediction log in the thread that searches it."""
        seconds = self.settings.deadline_seconds

        def search() -> Found:
            try:  # Without a log, the application has no route that searches it.
                return work(cast(LogWriter, self.log))
            except (OSError, DataError) as error:
                remedy = "try again later, or let psc-log review name a damaged file"
                raise LogUnavailable(f"the prediction log cannot be used now; {remedy}") from error

        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self.searcher, search)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the log was not searched within {seconds:g} s; try again") from error

    def refresh_metrics(self) -> None:
        """Bring the metrics up to date, before each scrape and with each sweep."""
        self.registry.refresh_metrics()
        if self.log is not None:
            self.metrics.psc_log_held_bytes.set(self.log.held_bytes)
        self.metrics.psc_inflight_requests.set(self.inflight + sum(self.board.arriving))
        self.metrics.psc_ready.set(0.0 if self.reasons() else 1.0)

    def refresh_gpu_metrics(self) -> None:
        """Read the memory and utilisation of the GPUs in use."""
        for device in {served.model.device for served in self.registry.served}:
            if device.type == "cuda":
                record_gpu(self.metrics, device)

    def _left_of(self, seconds: float) -> float:
        return max(0.0, self._draining_since + seconds - asyncio.get_running_loop().time())

    async def _load(self) -> None:
        try:
            await self.registry.start()
            self.host.models_loaded(self)
            await self.registry.settle()
        except DeviceError as error:
            self._end_process(str(error), ExitCode.FAILURE)
        except PSCError as error:
            self._end_process(str(error), ExitCode.BAD_INPUT)
        except Exception as error:
            logger.critical("loading failed", exc_info=error)
            self._end_process(f"loading failed: {type(error).__name__}; see the log", ExitCode.FAILURE)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self.registry.sweep()
                if self.registry.changed.is_set():
                    self.registry.changed.clear()
                    self.host.models_changed()
                if error := self.registry.device_error:
                    self._end_process(f"the compute device failed: {error}", ExitCode.FAILURE)
                self.refresh_metrics()
                self._descriptors.check()
                if self.memory.should_release(int(sum(self.board.grown))):
                    gc.collect()  # An exception and its traceback are a cycle, which may hold a request's body.
                    await asyncio.to_thread(release_freed_memory)
            except Exception:
                logger.exception("sweep failed")

    def _end_process(self, message: str, exit_code: int) -> None:
        """Ask the host, only once, to end the process with ``exit_code`` after answering the accepted requests."""
        if self.exit_code == ExitCode.OK:
            self.exit_code, self.exit_message = exit_code, message
            self.host.failed()


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.app.state.service
    return service


def service_to(role: Role, request: Request) -> Service:
    """Return the service if the caller has a key of this role."""
    service = service_of(request)
    service.keys.check(role, request.headers)
    return service
