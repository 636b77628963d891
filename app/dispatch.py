"""Connections for several processes: the supervisor accepts, and gives each to the worker that has the fewest.

Workers that accept on one socket take what they can get: who is awake takes a burst of connections whole, and clients
that keep theirs keep that worker busy while the others idle.

A pair of Unix sockets, a *channel*, joins the supervisor and each worker.  The supervisor sends a byte with every
connection's descriptor, and :data:`RELOAD`.  The worker sends :data:`READY` once, :data:`TAKEN` for every connection
that it has received, :data:`ENDED` for every one that has ended, and :data:`RELOAD` when the other workers should do as
it has done.  A closed end says that no more is given, or taken.  Until it hears that a connection was taken, the
supervisor keeps it, and gives it to another worker when that one dies.  Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from itertools import chain
from typing import Final, NamedTuple

logger = logging.getLogger("psc.dispatch")

READY: Final = b"r"
TAKEN: Final = b"t"
ENDED: Final = b"e"
RELOAD: Final = b"l"
_CONNECTION: Final = b"c"

_VARIABLE: Final = "_PSC_CHANNEL"
_AT_ONCE: Final = 64
"""Connections accepted, received, or on their way to a worker at once."""

_RETRY_SECONDS: Final = 0.01
_LAST_SECONDS: Final = 1.0
_NOT_NOW: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})


class _Worker:
    """The supervisor's view of a worker.

    Attributes:
        channel: To it.
        ready: Whether it takes connections.
        connections: Given to it and not ended.
        untaken: Those of them that it has not been heard to have received, oldest first.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.ready = False
        self.connections = 0
        self.untaken: deque[socket.socket] = deque()


class Dispatcher:
    """The supervisor's side.

    Args:
        listener: Listening; closed by :meth:`close`.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._held: deque[socket.socket] = deque()
        self._refused = False

    @property
    def ready(self) -> bool:
        """Whether any worker answers."""
        return any(worker.ready for worker in self._workers)

    def add(self) -> socket.socket:
        """A new worker's end of a channel; close it once the worker has inherited it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = _Worker(ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return theirs

    def turn(self, seconds: float) -> bool:
        """Hear workers and hand out connections; waits ``seconds`` for something to do, and says whether there was."""
        for _ in range(len(self._held)):
            self._give(self._held.popleft())
        self._accept_if(not self._held and self.ready)
        events = self._selector.select(_RETRY_SECONDS if self._held else seconds)
        for key, _ in events:
            if key.data is None:
                self._take_up()
            else:
                self._hear(key.data)
        return bool(events or self._held)

    def reload(self, but: _Worker | None = None) -> None:
        """Have the workers reload; one that is still starting does so when it is ready."""
        for worker in self._workers:
            if worker is not but:
                with contextlib.suppress(OSError):  # It is about to be replaced.
                    worker.channel.send(RELOAD)

    def close(self) -> None:
        """Accept no more, hand out the connections that clients believe to have, and let go of the workers."""
        self._listener.listen(0)
        end = time.monotonic() + _LAST_SECONDS
        while self.turn(0.02) and time.monotonic() < end:
            pass
        self._selector.close()
        self._listener.close()
        for worker in self._workers:
            worker.channel.close()
        for connection in (*self._held, *chain(*(worker.untaken for worker in self._workers))):
            connection.close()

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
                if not self._refused:
                    logger.error("expected to accept a connection, %s; it waits until it can be", error.strerror)
                self._refused = True
                time.sleep(_RETRY_SECONDS)
                return
            if self._refused:
                logger.info("accepts connections again")
            self._refused = False
            self._give(connection)
            if self._held:
                return

    def _give(self, connection: socket.socket) -> None:
        """To the worker that has the fewest and can take it, or hold it until one can."""
        able = [worker for worker in self._workers if worker.ready and len(worker.untaken) < _AT_ONCE]
        for worker in sorted(able, key=lambda worker: worker.connections):
            try:
                socket.send_fds(worker.channel, [_CONNECTION], [connection.fileno()])
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    worker.ready = False  # It takes no more; what it still has to say is heard.
                continue
            worker.connections += 1
            worker.untaken.append(connection)
            return
        self._held.append(connection)

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
            self._held += worker.untaken
            return
        worker.ready = worker.ready or READY in said
        for _ in range(said.count(TAKEN)):
            worker.untaken.popleft().close()
        worker.connections -= said.count(ENDED)
        if RELOAD in said:
            self.reload(but=worker)


class News(NamedTuple):
    """What the supervisor had to say.

    Attributes:
        connections: To be served.
        reload: Whether the bundles should be loaded again.
    """

    connections: list[socket.socket]
    reload: bool


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
        """One of the words above."""
        with contextlib.suppress(OSError):  # The supervisor is gone, which :meth:`receive` will tell.
            self._end.send(word)

    def receive(self) -> News | None:
        """What there is, or ``None`` when there will be nothing any more."""
        connections: list[socket.socket] = []
        reload = False
        while len(connections) < _AT_ONCE:
            try:
                said, descriptors, _flags, _address = socket.recv_fds(self._end, len(_CONNECTION), 1)
            except BlockingIOError:
                break
            except OSError:
                said = b""
            if not said:
                return News(connections, reload) if connections else None
            if said == RELOAD:
                reload = True
                continue
            self.say(TAKEN)
            if not descriptors:  # The kernel drops what a process has no room for.
                logger.error("expected a connection, this process has too many open files; raise its limit")
                self.say(ENDED)
            connections += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return News(connections, reload)

    def leave(self) -> list[socket.socket]:
        """Take no more, but what was sent already."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)
        connections: list[socket.socket] = []
        while news := self.receive():
            connections += news.connections
        return connections


def inherit(end: socket.socket) -> dict[str, str]:
    """The environment by which a worker finds its end."""
    return {_VARIABLE: str(end.fileno())}


def inherited_channel() -> Channel | None:
    """The channel to the supervisor, in a worker; ``None`` elsewhere."""
    number = os.environ.get(_VARIABLE)
    return None if number is None else Channel(socket.socket(fileno=int(number)))
