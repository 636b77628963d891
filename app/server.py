"""Run an application under uvicorn, with limits for each connection.

Uvicorn limits neither the size of a head nor the time it takes to arrive, nor trailers, which it reads as headers, nor
the number of requests that wait on a connection.  It waits for ever for a client that does not read its answer.  And it
drops the body of a request that offers to upgrade the connection, as the first request of Java's HTTP client does.

The limits are set in the callbacks of asyncio and httptools, and use only public names of uvicorn's class.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sized
from functools import partial
from typing import Any, Final, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.main import create_app, linger_seconds, prepare_process, settle_heap
from app.service import Host, Service
from app.settings import BACKLOG, Settings
from app.tracing import log_config

# The longest request line with headers, and the most framing (chunk sizes, trailers) between two pieces of a body.
MAX_HEAD_BYTES: Final = 1 << 16
# The time for the first request on a connection that was accepted just before the server ended.
FIRST_REQUEST_SECONDS: Final = 1.0


def _refusal(status: bytes, text: bytes) -> bytes:
    return (
        b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%s"
        % (status, len(text), text)
    )


_INVALID: Final = _refusal(b"400 Bad Request", b"Invalid HTTP request received.")
_TOO_LONG: Final = _refusal(
    b"431 Request Header Fields Too Large",
    b"expected at most %d bytes of request line and headers, got more\n" % MAX_HEAD_BYTES,
)
_VERSION: Final = _refusal(b"505 HTTP Version Not Supported", b"expected HTTP/1.0 or HTTP/1.1; use one of these\n")
_HOST: Final = _refusal(b"400 Bad Request", b"expected one Host header, got more; send one\n")
_EXPECTATION: Final = _refusal(b"417 Expectation Failed", b"expected Expect: 100-continue or none; leave it out\n")


class _Refused(Exception):
    """A complete head is refused; the argument is the answer."""


class _Tunnel(Exception):
    """The request is a CONNECT, after whose head the bytes are not HTTP."""


class _PipelineFlow(FlowControl):
    """Reads on only once no request waits for those before it: each read brings thousands, or more of a body."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """One connection.  A request that arrives in one piece, on a connection that was used before, starts no timer.

    At any time there is something that ends an open connection: a timer while the client owes us the rest of a head, or
    of a body that nobody reads any more; the application while it has the request; uvicorn's timer while the connection
    is idle.  Line ends between requests do not count as use of a connection.

    A client may close its side after its last request and wait for the answers.  A client that has left closes its side
    too, and the two look the same until something is written; only one that resets the connection has surely left.
    """

    def __init__(self, *arguments: Any, upload_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.url = b""
        self._timeout_s = upload_seconds
        self._in_head = True
        self._read_bytes = 0
        # Bytes received of the head, or since the last data of a body.  During parsing this is an upper bound: the
        # bytes that have just arrived may hold the end of an earlier request as well.
        self._head_bytes = 0
        self._offered_head = b""
        self._refused: bytes | None = None
        self._client_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PipelineFlow(transport, self.pipeline)
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_client()
        self._end_answer()

    def shutdown(self) -> None:
        # uvicorn would close this connection at once, though its first request may already be on the wire.
        if self.cycle is None:
            self.loop.call_later(FIRST_REQUEST_SECONDS, self._shutdown)
        else:
            self._shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the transport stays open, to answer the requests that were received completely."""
        # asyncio's TLS cannot half-close.  Closed here, because the loop would wait without limit until all is sent.
        if self.scheme == "https" or not self._answering() or self.cycle.more_body:
            self._close()
            return False
        # A refusal that waits for the answers before it needs the connection, and ends it itself.
        if self._refused is None:
            self.cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._read_bytes = len(data)
        self._head_bytes += self._read_bytes
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            # When a callback raises, httptools raises its own error, with that of the callback as the context.
            if isinstance(error.__context__, _Refused):
                self._refuse(error.__context__.args[0])
            else:
                self.logger.warning("Invalid HTTP request received.")
                self._refuse(_INVALID)
        else:
            if self._in_head:
                self._check_head(data)
            elif self._head_bytes > MAX_HEAD_BYTES:
                # Trailers without end, or a chunk size with extensions without end.
                self._refuse(_TOO_LONG)

    def _parse(self, data: bytes) -> None:
        """Parse received bytes; after an offer to upgrade, parse the head again without the offer."""
        rest: bytes | memoryview = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            # httptools cannot resume a parser that stopped at an upgrade.  uvicorn makes its own parser as lenient.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(self._offered_head)

    def _check_head(self, data: bytes) -> None:
        """Limit the size and the time of a head that is still incomplete."""
        # A head that began in these data may follow other requests and bodies, whose bytes do not count.
        if self._head_bytes == self._read_bytes:
            line = self.parser.get_method() + b" " + self.url
            self._head_bytes = len(data) - max(data.rfind(line), 0) if self.url else 1
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LONG)
            return
        self._end_idle()
        if self._client_timer is None:
            self._watch_client()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._read_bytes
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES and len(self._head(self.headers)) > MAX_HEAD_BYTES:
            raise _Refused(_TOO_LONG)
        self._check_fields()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Tunnel
            self._offered_head = self._head(header for header in self.headers if header[0] != b"upgrade")
            return
        self._end_idle()
        if self._client_timer is not None:
            self._end_client()
        super().on_headers_complete()
        # httptools reports trailers as headers, and uvicorn would append them to the list that the application reads.
        self.headers = []
        self._in_head = False

    def _check_fields(self) -> None:
        """Refuse what RFC 9112 and 9110 forbid and the parser lets through, except for a missing Host."""
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise _Refused(_VERSION)
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise _Refused(_HOST)
        if any(name == b"expect" and value.lower() != b"100-continue" for name, value in self.headers):
            raise _Refused(_EXPECTATION)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        # The head of an offered upgrade, which is parsed again without the offer.
        if self._in_head:
            return
        self._head_bytes = 0
        super().on_message_complete()
        # The application answered without reading the body.  uvicorn does nothing when such a body ends, and would
        # leave the connection without a timer from here on.
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._end_client()
            self._end_idle()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_closing()
        # ``cycle`` belongs to the newest request, so if it is not complete, another pipelined request comes next.
        if not self.cycle.response_complete:
            return
        if self._refused is not None:
            self.transport.write(self._refused)
            self._close()
        elif self.cycle.more_body:
            self._end_idle()
            self._watch_client()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _head(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in headers]
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, answer: bytes) -> None:
        """Refuse a request after the answers to those before it, and close the connection."""
        if self._in_head and self._answering():
            self._refused = answer
        else:
            self.transport.write(answer)
            self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _shutdown(self) -> None:
        super().shutdown()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Limit how long a closing connection may take to send what was written to it."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_answer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_timer is None:
            self._watch_answer()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._end_answer()
        super().resume_writing()

    def _watch_answer(self) -> None:
        self._end_answer()
        self._unread = self.transport.get_write_buffer_size()
        self._answer_timer = self.loop.call_later(self._timeout_s, self._check_answer)

    def _check_answer(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:  # The client reads, if slowly.
            self._watch_answer()
        else:
            self.transport.abort()

    def _watch_client(self) -> None:
        self._client_timer = self.loop.call_later(self._timeout_s, self._check_client)

    def _check_client(self) -> None:
        self._client_timer = None
        # While an earlier request is being answered, uvicorn may have paused reading: the delay is ours, then.
        if self._answering():
            self._watch_client()
        else:
            self._close()

    def _end_client(self) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None

    def _end_idle(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _end_answer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None


logger = logging.getLogger("psc.server")


class UvicornHost(Host):
    """A process that ``psc-serve`` started, in which uvicorn runs."""

    def __init__(self, address: str, began: float) -> None:
        self._address = address
        self._began = began  # when ``psc-serve`` was started, by the monotonic clock
        self._tasks = set[asyncio.Task[None]]()

    def models_loaded(self, service: Service) -> None:
        models = ", ".join(f"{served.name} on {served.model.device}" for served in service.registry.served)
        logger.info("Ready: %s (%s, %.0f s)", self._address, models, time.monotonic() - self._began)

    def models_changed(self) -> None:
        settle_heap()
        gc.enable()

    def failed(self) -> None:
        signal.raise_signal(signal.SIGTERM)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin some work beside the application, which a signal asks for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """Handle signals: SIGHUP reloads; SIGTERM drains and then ends uvicorn.

        Uvicorn closes idle connections as soon as it is told to end, which loses a request already on the wire.  So it
        is told a moment later: until then, ``Connection: close`` and ``/readyz`` send clients elsewhere.
        """
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        end = before[signal.SIGTERM]

        def drain() -> None:
            service.begin_drain()
            if callable(end):
                loop.call_later(linger_seconds(service.settings), end, signal.SIGTERM, None)

        loop.add_signal_handler(signal.SIGTERM, drain)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.begin(service.reload_quietly()))
        gc.disable()  # Until the models are loaded: collections would walk what libraries make, which is no garbage.
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            gc.enable()
            gc.unfreeze()  # Or libraries would report at exit that their objects have leaked.


class LastAccepting(uvicorn.Server):
    """Uvicorn's server, except that it answers the connections in the backlog when it ends.

    The kernel has completed their handshakes, so closing the listening socket would reset them.  A second Ctrl-C waits
    for no client, but the application is closed all the same; uvicorn would cancel it and log a traceback.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Nothing is awaited between the last accept and the close, or further connections would arrive in between.
        waiting = [each for listener in sockets or () for each in _accepted(listener)]
        for server in self.servers:
            server.close()
        answering = asyncio.gather(*map(self._answer, waiting))
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()
        await answering

    async def _answer(self, connection: socket.socket) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        make = cast(Callable[..., LimitedProtocol], config.http_protocol_class)
        make_protocol = partial(make, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        with contextlib.suppress(OSError):  # The client has left, or its TLS failed.
            _, protocol = await loop.connect_accepted_socket(make_protocol, connection, ssl=config.ssl)
            protocol.shutdown()


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept every connection in the backlog."""
    listener.setblocking(False)
    with contextlib.suppress(OSError):  # The backlog is empty, or no file descriptor is free.
        while True:
            yield listener.accept()[0]


def uvicorn_config(settings: Settings, application: Callable[[], ASGIApp]) -> uvicorn.Config:
    """Return the configuration with which uvicorn runs the application."""
    protocol = partial(LimitedProtocol, upload_seconds=settings.upload_seconds)
    return uvicorn.Config(
        application,
        factory=True,
        loop="uvloop",
        http=cast(type[LimitedProtocol], protocol),  # Uvicorn wants a class, but only calls it.
        ws="none",
        log_config=log_config(settings.log_level, is_terminal=sys.stderr.isatty()),
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=cast(int, settings.answer_seconds - linger_seconds(settings)),  # It only waits.
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


def serve(settings: Settings, listener: socket.socket, address: str, began: float) -> tuple[int, str]:
    """Serve until told to stop; return the exit code, and the reason in one line if it is not 0."""
    if settings.fronts:
        from app.processes import Processes

        return Processes(settings, listener, address, began).run()
    prepare_process(settings)
    app = create_app(settings, host=UvicornHost(address, began))
    server = LastAccepting(uvicorn_config(settings, lambda: app))
    try:
        server.run([listener])
    except SystemExit:  # Uvicorn raises a signal again once it has ended, and our handler exits; or startup has failed.
        if not server.started:
            raise
    service: Service = app.state.service
    return service.exit_code, service.exit_message
