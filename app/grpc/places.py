"""Places for messages that arrive.

gRPC gives a message when it is whole and shows nothing of it before, so what is bounded is how many may arrive at
once.  A call that sends nothing keeps its place only while nobody waits for one; else the client with the most places
gives up its oldest, once that has had :data:`GRACE_SECONDS`.  No client may have all places: another one finds a free
one at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from app.errors import TooManyRequests

GRACE_SECONDS: Final = 5.0
"""A message that arrives within this time keeps its place."""

MAXIMUM_WAITING: Final = 256
"""Calls that may wait for a place; each looks at all others."""


@dataclass(eq=False)
class _Place:
    client: str
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    has_had_enough_at: float = 0.0


class Places:
    """Places that the calls of many clients share.

    Args:
        count: Messages that may arrive at once, at least one; three quarters of them from one client.
    """

    def __init__(self, count: int) -> None:
        self._count = max(1, count)
        self._held: list[_Place] = []  # The oldest first, as in the next.
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Hold a place within the block, and wait for it before.

        Raises:
            TooManyRequests: Too many wait already, or others waited and the block took too long.
        """
        if sum(each.client == client for each in self._waiting) >= _most_of(MAXIMUM_WAITING) or (
            len(self._waiting) >= MAXIMUM_WAITING
        ):
            raise TooManyRequests("too many calls wait to send their messages; try again in 1 s", retry_after=1)
        mine = _Place(client)
        try:
            async with mine.scope:
                self._waiting.append(mine)
                self._assign()
                await mine.granted
                yield
        except TimeoutError as error:
            if not mine.scope.expired():
                raise
            raise TooManyRequests(
                f"the message had not arrived after {GRACE_SECONDS:g} s, and others waited; send it at once",
                retry_after=1,
            ) from error
        finally:
            (self._held if mine in self._held else self._waiting).remove(mine)
            self._assign()

    def _assign(self) -> None:
        """Give free places to those who wait, and have as many places given up as still wait."""
        now = asyncio.get_running_loop().time()
        places = Counter(each.client for each in self._held)
        for each in tuple(self._waiting):
            if len(self._held) < self._count and places[each.client] < _most_of(self._count):
                self._waiting.remove(each)
                self._held.append(each)
                places[each.client] += 1
                each.has_had_enough_at = now + GRACE_SECONDS
                each.granted.set_result(None)
        by_greed = sorted(self._held, key=lambda each: -places[each.client])  # The oldest first among equals.
        for rank, each in enumerate(by_greed):
            if not each.scope.expired():
                each.scope.reschedule(max(now, each.has_had_enough_at) if rank < len(self._waiting) else None)


def _most_of(count: int) -> int:
    return max(1, count * 3 // 4)
