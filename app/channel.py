"""What a front and the engine share: messages through a pair of sockets, and image bytes in memory that both see.

Both processes are forks of one process, which made the sockets and the memory and keeps them open.  So either of the
two can be replaced: its successor finds the same sockets, and the messages that nobody has read.
"""

from __future__ import annotations

import asyncio
import marshal
import mmap
import socket
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

# A front sends:
CALL: Final = 0  # a request: its number, its scope, and its images (:class:`.Taken`) or why they were refused, or None
PIECE: Final = 1  # some of a body that was asked for: the number, the bytes, whether there are more
LEFT: Final = 2  # the client of a request has left
NEXT: Final = 3  # the last piece of an answer was sent on
HELLO: Final = 4  # a new front: nobody waits for the answers to requests before this message
# The engine sends:
WANT: Final = 5  # asks for a piece of a body
ANSWER: Final = 6  # an answer begins: the number, the status, the headers, the first bytes, whether there are more
MORE: Final = 7  # some more of an answer: the number, the bytes, whether there are more
END: Final = 8  # a request that failed while it was answered
MODELS: Final = 9  # the served models, as (name, version, preprocessing), the default first, and those without room

_PACKET_BYTES: Final = 1 << 16
_FIRST, _LAST = 1, 2
_READS: Final = 64  # the most packets that are read before the event loop gets another turn
Message = tuple[Any, ...]


class Channel:
    """One end of the sockets, on the event loop: messages arrive whole and in order.

    What is sent in one turn of the loop goes together, as one packet if it is small: so one wake-up of the other
    process serves many requests.  Of several packets whose sender died in between, the rest never comes; the next first
    one says so.  Of those whose reader died in between, its successor forgets the rest.
    """

    def __init__(self, end: socket.socket, on_message: Callable[[Message], None]) -> None:
        self._end = end
        self._on_message = on_message
        self._messages: list[Message] = []  # of this turn
        self._unsent: deque[bytes] = deque()
        self._begun: list[bytes] = []  # the packets of messages that are not complete
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, *message: Any) -> None:
        """Send a message; what the sockets have no room for waits in this process."""
        if not self._messages:
            self._loop.call_soon(self._send_messages)
        self._messages.append(message)

    def _send_messages(self) -> None:
        data = marshal.dumps(self._messages)
        self._messages.clear()
        last = len(data) - _PACKET_BYTES
        for start in range(0, len(data), _PACKET_BYTES):
            mark = _FIRST * (start == 0) | _LAST * (start >= last)
            packet = bytes((mark,)) + data[start : start + _PACKET_BYTES]
            if self._unsent or not self._sent(packet):
                if not self._unsent:
                    self._loop.add_writer(self._end.fileno(), self._send_rest)
                self._unsent.append(packet)

    def close(self) -> None:
        """Read and write no more."""
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())

    def _sent(self, packet: bytes) -> bool:
        try:
            self._end.send(packet)
        except BlockingIOError:
            return False
        except OSError:  # The other processes are gone, and this one is about to follow them.
            return True
        return True

    def _send_rest(self) -> None:
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._end.fileno())

    def _read(self) -> None:
        for _ in range(_READS):
            try:
                packet = self._end.recv(_PACKET_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.close()
                return
            if packet[0] & _FIRST:
                self._begun.clear()
            elif not self._begun:  # A process that has died here had read what comes before it.
                continue
            self._begun.append(packet[1:])
            if packet[0] & _LAST:
                data = self._begun[0] if len(self._begun) == 1 else b"".join(self._begun)
                self._begun.clear()
                for message in marshal.loads(data):
                    self._on_message(message)


_PAGE: Final = mmap.PAGESIZE
_MAX_REASON: Final = 4096  # bytes


class Arena:
    """Memory for the images of one front's requests; the front alone takes and gives back, the engine only reads.

    Several requests together have at most ``limit`` bytes, but a lone one may have all of it.
    """

    def __init__(self, memory: mmap.mmap, limit: int | None = None) -> None:
        self._memory = memory
        self._room = len(memory) if limit is None else limit  # what is left of the limit
        self._free: list[tuple[int, int]] = [(0, len(memory))]  # (start, end) of each gap, in order
        self._taken: dict[int, int] = {}  # the end of each place that is taken, by its start

    def take(self, size: int) -> int | None:
        """Take the first place of ``size`` bytes and return where it begins; None if there is none."""
        size = -(-max(size, 1) // _PAGE) * _PAGE
        if self._taken and size > self._room:
            return None
        for at, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[at : at + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = start + size
                self._room -= size
                return start
        return None

    def give(self, start: int) -> None:
        """Give back the place that begins there."""
        end = self._taken.pop(start)
        self._room += end - start
        insort(self._free, (start, end))
        at = self._free.index((start, end))
        for left in (at, at - 1):  # Join with the gap after it, then with the one before it.
            if 0 <= left < len(self._free) - 1 and self._free[left][1] == self._free[left + 1][0]:
                self._free[left : left + 2] = [(self._free[left][0], self._free[left + 1][1])]

    def release(self) -> None:
        """Give the memory back to the system until it is used again, if no place is taken."""
        if not self._taken:
            self._memory.madvise(mmap.MADV_REMOVE)

    def bytes_at(self, start: int, size: int) -> memoryview:
        """Return a view of so many bytes."""
        return memoryview(self._memory)[start : start + size]

    def images_at(self, start: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return a view of the images of this shape that begin there."""
        return np.ndarray(shape, np.uint8, self._memory, start)


class Board:
    """What the processes tell each other without a message: which engine serves, and that each of them is alive."""

    def __init__(self, fronts: int, models: int = 1) -> None:
        self.fronts = fronts
        memory = mmap.mmap(-1, 8 * (5 * fronts + 5) + models + _MAX_REASON)
        # NumPy writes a number at once; struct would write zeros first, which another process may read.
        self._engines = np.frombuffer(memory, np.int64, 2)
        # When each process was last known to be alive: the fronts, and after them the engine.
        self.beats = np.frombuffer(memory, np.float64, fronts + 1, self._engines.nbytes)
        counts = np.frombuffer(memory, np.int64, 4 * fronts + 2, self._engines.nbytes + self.beats.nbytes)
        # Of each front: the requests whose images it reads or decodes, those that it decodes now, and the bytes that it
        # holds beyond those it began with.
        self.arriving, self.decoding, self.grown = counts[: 3 * fronts].reshape(3, fronts)
        # What requests hold in each process, and last what they may; see :class:`.MemoryBudget`.
        self.memory = counts[3 * fronts :].data
        self.memory[-1] = np.iinfo(np.int64).max  # until the engine has measured it
        self.unloaded = np.frombuffer(memory, np.int8, models, 8 * (5 * fronts + 5))  # the models out of service
        self._reason = memoryview(memory)[-_MAX_REASON:]
        self.engine = 1

    @property
    def engine(self) -> int:
        """The number of the engine that serves, or is about to; a higher one once it has died."""
        return int(self._engines[0])

    @engine.setter
    def engine(self, number: int) -> None:
        self._engines[0] = number

    @property
    def ready_engine(self) -> int:
        """The number of the last engine that was ready; 0 if none has been."""
        return int(self._engines[1])

    def set_ready(self, engine: int) -> None:
        """Note that the engine of this number is ready."""
        self._engines[1] = engine

    def forget(self, front: int) -> None:
        """Forget the requests of a front that has died."""
        self.arriving[front] = self.decoding[front] = self.grown[front] = 0

    @property
    def reason(self) -> str:
        """Why the engine has ended, in one line; empty if it has not said."""
        return bytes(self._reason).rstrip(b"\0").decode(errors="ignore")

    def set_reason(self, text: str) -> None:
        """Say why the engine ends."""
        self._reason[:] = text.encode()[:_MAX_REASON].ljust(_MAX_REASON, b"\0")


@dataclass
class Place:
    """What one front and the engine have between them."""

    index: int
    memory: mmap.mmap
    front: socket.socket
    engine: socket.socket

    def close(self) -> None:
        """Close both ends in this process."""
        self.front.close()
        self.engine.close()

    @classmethod
    def make(cls, index: int, size: int) -> Self:
        front, engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (front, engine):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return cls(index, mmap.mmap(-1, size), front, engine)
