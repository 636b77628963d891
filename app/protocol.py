"""Uvicorn's HTTP protocol with limits: how long a request's head may be, and how long a client may keep us waiting.

Uvicorn limits neither the size of a request's head nor the time it takes to arrive, nor trailers, which it reads as
headers.  It waits for ever for a client that does not read its answer.  And it drops the body of a request that offers
to upgrade the connection, as the first one of Java's client does.

The limits hang on the callbacks of asyncio and httptools; of uvicorn's class only public names are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 1 << 16
"""Longest request line with headers, and longest run of a body's bytes that are not its content."""

FIRST_REQUEST_SECONDS: Final = 1.0
"""Time for the first request of a connection that was accepted just before the server ended."""


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
    """A head that has come whole and is not taken; its argument is the answer."""


class _Tunnel(Exception):
    """A CONNECT request: what follows its head is not HTTP."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection.  A request that comes whole, on a connection that is in use, costs no timer.

    Whenever a connection is open, something ends it: the client's time is up (it owes us the rest of a head, or of a
    body that nobody waits for any more), the application ends (it has the request), or the connection is idle for too
    long.  Line ends between requests are no use of a connection.

    A client may close its side once it has sent its requests whole, and wait for the answers.  One that has left closes
    its side too, and looks the same until something is written to it; one that resets the connection has left.

    Args:
        upload_seconds: How long a client may keep us waiting.
    """

    def __init__(self, *arguments: Any, upload_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.url = b""
        self._timeout_s = upload_seconds
        self._in_head = True
        self._read_bytes = 0
        self._head_bytes = 0  # What has come of the head, or since the last bytes of a body; while parsing, at most.
        self._offered_head = b""
        self._refused: bytes | None = None
        self._client_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_client()
        self._end_answer()

    def shutdown(self) -> None:
        # uvicorn would close this connection at once, though its first request may be on the way.
        if self.cycle is None:
            self.loop.call_later(FIRST_REQUEST_SECONDS, self._shutdown)
        else:
            self._shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the transport stays open: for the answers to requests that came whole."""
        # asyncio's TLS cannot half-close.  Closed here and not by the loop, which would wait without a limit.
        if self.scheme == "https" or not self._answering() or self.cycle.more_body:
            self._close()
            return False
        # A refusal is sent after the answers and ends the connection itself.
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
            # httptools raises its own error for what a callback raised, and keeps that as the context.
            if isinstance(error.__context__, _Refused):
                self._refuse(error.__context__.args[0])
            else:
                self.logger.warning("Invalid HTTP request received.")
                self._refuse(_INVALID)
        else:
            if self._in_head:
                self._check_head(data)
            elif self._head_bytes > MAX_HEAD_BYTES:
                # Endless trailers, or extensions of a chunk's size.
                self._refuse(_TOO_LONG)

    def _parse(self, data: bytes) -> None:
        """Parse; an upgrade is not accepted: the head is read again without it, and what follows is HTTP as before."""
        rest: bytes | memoryview = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            # httptools cannot resume a parser that stopped at an upgrade; the new one is as lenient as uvicorn's own.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(self._offered_head)

    def _check_head(self, data: bytes) -> None:
        """The head has not come whole."""
        # A head that began in these data may stand behind other requests and bodies, which do not count.
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
        # httptools reports trailers as headers, and uvicorn would append them to those that the application reads.
        self.headers = []
        self._in_head = False

    def _check_fields(self) -> None:
        """Refuse what RFC 9112 and 9110 have a server refuse and the parser lets through; Host may be missing."""
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
        # The head of an upgrade, which will be read again.
        if self._in_head:
            return
        self._head_bytes = 0
        super().on_message_complete()
        # Nobody read this body; uvicorn does nothing at its end, but the connection is idle from here on.
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
        # ``cycle`` is that of the newest request: another one is still in the pipeline.
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
        """Answer what cannot be read, after the answers to the requests before it, and end the connection."""
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
        """A closed connection sends what was written first; its client may not take for ever to read it."""
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
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_answer()
        else:
            self.transport.abort()

    def _watch_client(self) -> None:
        self._client_timer = self.loop.call_later(self._timeout_s, self._check_client)

    def _check_client(self) -> None:
        self._client_timer = None
        # An earlier request is being answered; until that is done, uvicorn may have paused reading.
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
