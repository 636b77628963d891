"""Limit how many messages may arrive at once, by places that calls share fairly.

gRPC delivers a message only when it is complete, so its size cannot be limited while it arrives, only the number of
messages that arrive at once.  A free place goes to the waiting call whose client has the fewest places.  While other
calls wait, the client with the most places loses its oldest one after a grace period; without such calls, a place is
kept however slow the message is.  No client may have all of several places, so that another client finds one free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from app.errors import TooManyRequests

# The grace period in which a message keeps its place; at most a third of the time in which it must arrive.
MESSAGE_SECONDS: Final = 5.0

MAX_WAITING: Final = 256  # the maximum number of calls that wait for a place; each wait costs a pass over all others


@dataclass(eq=False)
class _Place:
    client: str
    scope: asyncio.Timeout  # Ends the wait for a place and, once the place is granted, the use of it.
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    grace_ends_at: float = 0.0


class Places:
    """Places that the calls of many clients share."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count = max(1, count)
        self._grace = min(MESSAGE_SECONDS, seconds / 3)
        # Shorter than the time to arrive, so that a call that only waited is told so, and not to send faster.
        self._patience = 0.9 * seconds
        self._held: list[_Place] = []  # Oldest first, as is the next list.
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it within the block."""
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
            reason = f"the message did not arrive within {self._grace:g} s while others waited; send it at once"
            if place in self._waiting:
                reason = "too many other messages were arriving; try again in 1 s"
            raise TooManyRequests(reason, retry_after=1) from error
        finally:
            (self._held if place in self._held else self._waiting).remove(place)
            self._assign()

    def _assign(self) -> None:
        """Grant free places to waiting calls, and let as many places expire as the calls still waiting could have."""
        now = asyncio.get_running_loop().time()
        places, most = Counter(each.client for each in self._held), _most_of(self._count)
        while len(self._held) < self._count:
            # A call whose wait has timed out has its future cancelled, and stays in the list until its task runs.
            able = [each for each in self._waiting if places[each.client] < most and not each.granted.done()]
            if not able:
                break
            each = min(able, key=lambda each: places[each.client])  # min() takes the oldest among equals.
            self._waiting.remove(each)
            self._held.append(each)
            places[each.client] += 1
            each.grace_ends_at = now + self._grace
            each.granted.set_result(None)
        waiting = Counter(each.client for each in self._waiting if not each.granted.done())
        wanted = sum(min(count, most) for count in waiting.values())
        most_places_first = sorted(self._held, key=lambda each: -places[each.client])  # Stable: the oldest first.
        for rank, each in enumerate(most_places_first):
            if not each.scope.expired():
                each.scope.reschedule(max(now, each.grace_ends_at) if rank < wanted else None)


def _most_of(count: int) -> int:
    return max(1, count * 3 // 4)
