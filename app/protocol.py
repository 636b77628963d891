"""Uvicorn's HTTP protocol with limits: how long a request's head may be, and how long a client may keep us waiting.

Uvicorn itself takes a head of any size at any pace, and buffers an answer for as long as nobody reads it.  And it sends
the head of an answer apart from its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 1 << 16
"""Longest request line with headers, bytes."""

_MOST_HELD_BYTES: Final = 1 << 16
_TOO_LONG_TEXT: Final = b"expected at most %d bytes of request line and headers, got more\n" % MAX_HEAD_BYTES
_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TOO_LONG_TEXT), _TOO_LONG_TEXT)
)


class JoinedWrites:
    """A transport by which what is written in one turn of the event loop, such as head and body, goes in one piece.

    Two pieces are two system calls here, and two packets and two wake-ups there.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)
        self._size += len(data)
        if self._size >= _MOST_HELD_BYTES:  # What is held back cannot make the transport pause the writer.
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._size

    def _send(self) -> None:
        written, self._written, self._size = self._written, [], 0
        if written and not self._transport.is_closing():
            self._transport.write(b"".join(written))


class LimitedProtocol(HttpToolsProtocol):
    """One connection.  A request that comes whole, on a connection that is in use, costs no timer."""

    patience_s: ClassVar[float] = 60.0
    """Seconds in which a head must be complete, and in which a client must take something of an answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._head_timer = self.loop.call_later(self.patience_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_answer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LONG)
                self.transport.close()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(self.patience_s, self.transport.close)
        elif self._head_timer is not None:
            self._end_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_timer is None:
            self._watch_answer()

    def resume_writing(self) -> None:
        self._end_answer()
        super().resume_writing()

    def _watch_answer(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._answer_timer = self.loop.call_later(self.patience_s, self._check_answer)

    def _check_answer(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_answer()
        else:
            self.transport.abort()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_answer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None


def protocol(patience_s: float, on_end: Callable[[], None]) -> type[LimitedProtocol]:
    """The class for a server whose clients may keep it waiting for ``patience_s`` seconds.

    Args:
        patience_s: See the class.
        on_end: Called when a connection has ended.
    """

    class Protocol(LimitedProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            on_end()

    Protocol.patience_s = patience_s
    return Protocol
