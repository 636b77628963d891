"""Places for messages that arrive.

gRPC gives a message when it is whole and shows nothing of it before, so what is bounded is how many may arrive at
once.  Who waits gets a free place before those whose clients have more.  A call that sends nothing keeps its place only
while nobody waits who could have it; else the client with the most places gives up its oldest, once that has had a
grace.  Of several places no client may have all: another one finds a free one at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from app.errors import TooManyRequests

MESSAGE_SECONDS: Final = 5.0
"""A message that arrives within this time keeps its place; of a shorter time to arrive a third."""

MAX_WAITING: Final = 256
"""Calls that may wait for a place; each looks at all others."""


@dataclass(eq=False)
class _Place:
    client: str
    scope: asyncio.Timeout  # ends the wait for a place, then the place
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    grace_ends_at: float = 0.0


class Places:
    """Places that the calls of many clients share.

    Args:
        count: Messages that may arrive at once, at least one; of several three quarters from one client.
        seconds: Time in which a message must arrive, the wait for a place included.
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._count = max(1, count)
        self._grace = min(MESSAGE_SECONDS, seconds / 3)
        self._patience = 0.9 * seconds  # So that who only waited is told so, and not to send faster.
        self._held: list[_Place] = []  # The oldest first, as in the next.
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Hold a place within the block, and wait for it before.

        Raises:
            TooManyRequests: Too many wait already, no place became free, or others waited and the block took too long.
        """
        if sum(each.client == client for each in self._waiting) >= _most_of(MAX_WAITING) or (
            len(self._waiting) >= MAX_WAITING
        ):
            raise TooManyRequests("too many calls wait to send their messages; try again in 1 s", retry_after=1)
        place = _Place(client, asyncio.timeout(self._patience))
        try:
            async with place.scope:
                self._waiting.append(place)
                self._assign()
                await place.granted
                yield
        except TimeoutError as error:
            if not place.scope.expired():
                raise
            reason = f"the message had not arrived after {self._grace:g} s, and others waited; send it at once"
            if place in self._waiting:
                reason = "no place for the message became free; try again in 1 s"
            raise TooManyRequests(reason, retry_after=1) from error
        finally:
            (self._held if place in self._held else self._waiting).remove(place)
            self._assign()

    def _assign(self) -> None:
        """Give free places to those who wait, and have as many given up as others could have."""
        now = asyncio.get_running_loop().time()
        places, most = Counter(each.client for each in self._held), _most_of(self._count)
        while len(self._held) < self._count:
            # One whose time is over has lost its future, and leaves when its task has its turn.
            able = [each for each in self._waiting if places[each.client] < most and not each.granted.done()]
            if not able:
                break
            each = min(able, key=lambda each: places[each.client])  # The oldest first among equals.
            self._waiting.remove(each)
            self._held.append(each)
            places[each.client] += 1
            each.grace_ends_at = now + self._grace
            each.granted.set_result(None)
        waiting = Counter(each.client for each in self._waiting if not each.granted.done())
        wanted = sum(min(count, most) for count in waiting.values())
        most_places_first = sorted(self._held, key=lambda each: -places[each.client])  # The oldest first among equals.
        for rank, each in enumerate(most_places_first):
            if not each.scope.expired():
                each.scope.reschedule(max(now, each.grace_ends_at) if rank < wanted else None)


def _most_of(count: int) -> int:
    return max(1, count * 3 // 4)
