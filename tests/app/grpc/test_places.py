"""Places for messages: bounded, shared between clients, given up by the silent when others wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("grpc", reason="the gRPC extra is not installed")

from app import grpc
from app.errors import TooManyRequests
from app.grpc import MAX_WAITING, MESSAGE_SECONDS, Places
from tests.app.support import clock, settled, until

pytestmark = pytest.mark.anyio


class Calls:
    """Calls that hold a place until they are told to go."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.holding: list[str] = []
        self.let_in: list[str] = []
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, client: str, count: int = 1) -> list[asyncio.Task[None]]:
        started = [asyncio.ensure_future(self._hold(client)) for _ in range(count)]
        self.tasks += started
        return started

    async def _hold(self, client: str) -> None:
        async with self.places.place(client):
            self.holding.append(client)
            self.let_in.append(client)
            try:
                await self.go.wait()
            finally:
                self.holding.remove(client)


@asynccontextmanager
async def calls(count: int, seconds: float = 1e6) -> AsyncIterator[Calls]:
    held = Calls(Places(count, seconds))
    yield held
    held.go.set()
    await asyncio.gather(*held.tasks, return_exceptions=True)
    assert not held.holding
    async with held.places.place("afterwards"):
        pass


async def test_a_client_leaves_places_to_others() -> None:
    async with calls(8) as held:
        held.start("greedy", 8)
        await settled()
        assert held.holding == ["greedy"] * 6
        held.start("modest", 2)
        await settled()
        assert sorted(held.holding) == ["greedy"] * 6 + ["modest"] * 2


async def test_who_waits_gets_the_place_of_one_who_leaves() -> None:
    async with calls(1) as held:
        (first,) = held.start("a")
        held.start("b")
        await settled()
        assert held.holding == ["a"]
        first.cancel()
        await settled()
        assert held.holding == ["b"]


async def test_the_silent_give_up_when_others_wait() -> None:
    async with calls(4) as held:
        with clock() as advance:
            greedy = held.start("greedy", 3)
            (other,) = held.start("other")
            await settled()
            advance(2 * MESSAGE_SECONDS)
            await settled()
            assert len(held.holding) == 4  # Nobody waits: they are left alone.
            held.start("late")
            await until(lambda: "late" in held.holding)
            with pytest.raises(TooManyRequests, match="others waited"):
                await greedy[0]
            assert not any(each.done() for each in (*greedy[1:], other))


async def test_no_place_is_taken_within_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "MESSAGE_SECONDS", 3600)
    async with calls(1) as held:
        held.start("a")
        (late,) = held.start("b")
        await settled()
        assert held.holding == ["a"]
        late.cancel()
        await settled()
        assert held.holding == ["a"]


async def test_a_waiting_one_that_leaves_spares_the_others() -> None:
    async with calls(1) as held:
        with clock() as advance:
            (first,) = held.start("a")
            (late,) = held.start("b")
            await settled()
            late.cancel()
            await settled()
            advance(2 * MESSAGE_SECONDS)
            await settled()
            assert not first.done()


async def test_who_could_have_no_place_takes_none_from_others() -> None:
    async with calls(4) as held:
        with clock() as advance:
            held.start("greedy", 3)
            (other,) = held.start("other")
            held.start("greedy", 3)
            await settled()
            for _ in range(2):
                advance(2 * MESSAGE_SECONDS)
                await settled()
                assert sum(each.done() for each in held.tasks) == 3  # Its own give up, one for each that waited.
            assert not other.done()


async def test_who_waits_comes_before_those_of_clients_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "MESSAGE_SECONDS", 0.2)
    async with calls(8) as held:
        for greedy in ("a", "b"):
            held.start(greedy, 50)
        held.start("modest")
        await settled()
        assert len(held.holding) == 8 and "modest" not in held.holding
        await until(lambda: "modest" in held.let_in)
        assert held.let_in.index("modest") == 8  # The first of those that waited.


async def test_a_call_that_ends_while_others_are_let_in_ends_alone() -> None:
    async with calls(1) as held:
        (first,) = held.start("a")
        late, last = held.start("b", 2)
        await settled()
        late.cancel()  # And has not had its turn when the place becomes free.
        first.cancel()
        await settled()
        assert first.cancelled() and late.cancelled() and not last.done()
        assert held.holding == ["b"]


async def test_who_only_waits_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "MESSAGE_SECONDS", 3600)
    async with calls(1, 0.3) as held:
        held.places._grace = 3600.0
        (first,) = held.start("a")
        (late,) = held.start("b")
        with pytest.raises(TooManyRequests, match="too many other messages were arriving"):
            await late
        assert not first.done()


async def test_too_many_that_wait_are_refused() -> None:
    async with calls(1) as held:
        held.start("a", 1 + MAX_WAITING * 3 // 4)
        await settled()
        with pytest.raises(TooManyRequests, match="too many calls wait"):
            async with held.places.place("a"):
                pytest.fail("was let in")
        held.start("b", MAX_WAITING // 4)
        await settled()
        with pytest.raises(TooManyRequests, match="too many calls wait"):
            async with held.places.place("c"):
                pytest.fail("was let in")


async def test_a_timeout_of_the_caller_is_the_callers() -> None:
    places = Places(1, 60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), places.place("a"):
            await asyncio.Event().wait()
    async with places.place("a"):
        pass
