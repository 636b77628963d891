"""Connections for several processes: the supervisor accepts, and gives each to the worker that has the fewest.

Workers that accept on one socket take what they can get: who is awake takes a burst of connections whole, and clients
that keep theirs keep that worker busy while the others idle.

A pair of Unix sockets, a *channel*, joins the supervisor and each worker.  The supervisor sends a byte with every
connection's descriptor; the worker sends :data:`READY` once, :data:`ENDED` for every connection that has ended, and
:data:`RELOADED` when the other workers should reload too.  A closed end says that no more is given, or taken.  Nothing
heavy is imported here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("psc.dispatch")

READY: Final = b"r"
ENDED: Final = b"e"
RELOADED: Final = b"l"
_CONNECTION: Final = b"c"

_VARIABLE: Final = "_PSC_CHANNEL"
_AT_ONCE: Final = 64
_RETRY_SECONDS: Final = 0.01
_LAST_SECONDS: Final = 1.0
_NOT_NOW: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})


class _Worker:
    """The supervisor's view of a worker: its slot, the channel, whether it is ready, how many connections it has."""

    def __init__(self, slot: int, channel: socket.socket) -> None:
        self.slot = slot
        self.channel = channel
        self.ready = False
        self.connections = 0


class Dispatcher:
    """The supervisor's side.

    Args:
        listener: Listening; closed by :meth:`close`.
        on_reloaded: Told the slot of a worker that says :data:`RELOADED`.
    """

    def __init__(self, listener: socket.socket, on_reloaded: Callable[[int], None] = lambda slot: None) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._on_reloaded = on_reloaded
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._held: socket.socket | None = None

    def add(self, slot: int) -> socket.socket:
        """A new worker's end of a channel; close it once the worker has inherited it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = _Worker(slot, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return theirs

    def turn(self, seconds: float) -> bool:
        """Hear workers and hand out connections; waits ``seconds`` for something to do, and says whether there was."""
        if self._held is not None:
            self._give(self._held)
        ready = any(worker.ready for worker in self._workers)
        self._accept_if(ready and self._held is None)
        events = self._selector.select(seconds if self._held is None else _RETRY_SECONDS)
        for key, _ in events:
            if key.data is None:
                self._take_up()
            else:
                self._hear(key.data)
        return bool(events) or self._held is not None

    def close(self) -> None:
        """Accept no more, hand out the connections that clients believe to have, and let go of the workers."""
        self._listener.listen(0)
        end = time.monotonic() + _LAST_SECONDS
        while self.turn(0.02) and time.monotonic() < end:
            pass
        self._selector.close()
        for each in (self._listener, self._held, *(worker.channel for worker in self._workers)):
            if each is not None:
                each.close()

    def _accept_if(self, accept: bool) -> None:
        if accept and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepting and not accept:
            self._selector.unregister(self._listener)
        self._accepting = accept

    def _take_up(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.error("expected to accept a connection, %s", error.strerror)
                time.sleep(_RETRY_SECONDS)
                return
            self._give(connection)
            if self._held is not None:
                return

    def _give(self, connection: socket.socket) -> None:
        """To the worker that has the fewest and can take it, or hold it until one can."""
        for worker in sorted(self._workers, key=lambda worker: worker.connections):
            if not worker.ready:
                continue
            try:
                socket.send_fds(worker.channel, [_CONNECTION], [connection.fileno()])
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    worker.ready = False  # It takes no more; what it still has to say is heard.
                continue
            worker.connections += 1
            connection.close()
            self._held = None
            return
        self._held = connection

    def _hear(self, worker: _Worker) -> None:
        try:
            said = worker.channel.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            self._workers.remove(worker)
            return
        worker.ready = worker.ready or READY in said
        worker.connections -= said.count(ENDED)
        if RELOADED in said:
            self._on_reloaded(worker.slot)


class Channel:
    """A worker's side.

    Args:
        end: From :meth:`Dispatcher.add`, inherited.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def fileno(self) -> int:
        """Readable when there is something to :meth:`receive`."""
        return self._end.fileno()

    def say(self, word: bytes) -> None:
        """:data:`READY`, :data:`ENDED` or :data:`RELOADED`."""
        with contextlib.suppress(OSError):  # The supervisor is gone, which :meth:`receive` will tell.
            self._end.send(word)

    def receive(self) -> list[socket.socket] | None:
        """The next connections, or ``None`` when no more will come."""
        connections: list[socket.socket] = []
        while len(connections) < _AT_ONCE:
            try:
                said, descriptors, _flags, _address = socket.recv_fds(self._end, len(_CONNECTION), 1)
            except BlockingIOError:
                break
            except OSError:
                said = b""
            if not said:
                return connections or None
            if not descriptors:  # The kernel drops what a process has no room for.
                logger.error("expected a connection, this process has too many open files; raise its limit")
                self.say(ENDED)
            connections += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return connections

    def leave(self) -> list[socket.socket]:
        """Take no more, but what was sent already."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)
        connections: list[socket.socket] = []
        while more := self.receive():
            connections += more
        return connections


def inherit(end: socket.socket) -> dict[str, str]:
    """The environment by which a worker finds its end."""
    return {_VARIABLE: str(end.fileno())}


def inherited_channel() -> Channel | None:
    """The channel to the supervisor, in a worker; ``None`` elsewhere."""
    number = os.environ.get(_VARIABLE)
    return None if number is None else Channel(socket.socket(fileno=int(number)))
