"""Messages and shared memory between a front and the engine."""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.channel import Arena, Board, Channel, Place

PAGE = mmap.PAGESIZE


async def arrived(messages: list[Any], count: int) -> None:
    async with asyncio.timeout(60):
        while len(messages) < count:
            await asyncio.sleep(0.001)


@pytest.mark.anyio
async def test_messages_of_every_size_arrive_whole_and_in_order() -> None:
    place = Place.make(0, PAGE)
    got: list[Any] = []
    back: list[Any] = []
    front, engine = Channel(place.front, back.append), Channel(place.engine, got.append)
    # Far more than the sockets hold at once, so that some wait in this process.
    sent = [
        (number, None, "é", {"a": 1.5}, os.urandom(size)) for number, size in enumerate([0, 1, 70_000, 5_000_000, 9])
    ]
    for message in sent:
        front.send(*message)
        engine.send("to", message[0])
    await arrived(got, len(sent))
    await arrived(back, len(sent))
    assert got == sent
    assert back == [("to", number) for number in range(len(sent))]
    for _ in range(3):
        await asyncio.sleep(0)
        front.send("later")
    await arrived(got, len(sent) + 3)
    front.close()
    engine.close()
    place.close()


@pytest.mark.anyio
async def test_what_a_dead_sender_began_is_forgotten() -> None:
    place = Place.make(0, PAGE)
    got: list[Any] = []
    engine = Channel(place.engine, got.append)
    place.front.send(b"\x01" + b"the first packet of several")
    successor = Channel(place.front, lambda _: None)
    successor.send("whole")
    await arrived(got, 1)
    assert got == [("whole",)]
    successor.close()
    place.front.close()  # As if all other processes had ended.
    await asyncio.sleep(0.01)
    engine.send("nobody reads this")
    await asyncio.sleep(0.01)
    engine.close()
    place.close()


@pytest.mark.anyio
async def test_the_rest_of_what_a_dead_reader_began_is_forgotten() -> None:
    place = Place.make(0, PAGE)
    got: list[Any] = []
    front = Channel(place.front, lambda _: None)
    front.send(os.urandom(200_000))
    await asyncio.sleep(0.01)
    assert len(place.engine.recv(1 << 17)) > 1 << 16
    successor = Channel(place.engine, got.append)
    front.send("whole")
    await arrived(got, 1)
    assert got == [("whole",)]  # And no callback has failed, which anyio would raise.
    front.close()
    successor.close()
    place.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE)), max_size=60))
@settings(deadline=None)
def test_places_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]) -> None:
    arena, size = Arena(mmap.mmap(-1, 16 * PAGE)), 16 * PAGE
    held: list[tuple[int, int]] = []
    for gives, number in steps:
        if gives and held:
            arena.give(held.pop(number % len(held))[0])
            continue
        start = arena.take(number)
        if start is None:  # Only where no gap is long enough.
            ends = [0, *(end for _, end in sorted(held))]
            gaps = zip(ends, [*(start for start, _ in sorted(held)), size], strict=True)
            assert max(start - end for end, start in gaps) < max(number, 1)
            continue
        end = start + -(-max(number, 1) // PAGE) * PAGE
        assert 0 <= start < end <= size
        assert all(end <= other or start >= stop for other, stop in held)
        held.append((start, end))
    for start, _ in held:
        arena.give(start)
    assert arena.take(size) == 0


def test_only_a_lone_place_may_exceed_the_limit() -> None:
    arena = Arena(mmap.mmap(-1, 8 * PAGE), limit=2 * PAGE)
    assert arena.take(8 * PAGE) == 0
    assert arena.take(1) is None
    arena.give(0)
    assert (arena.take(1), arena.take(1), arena.take(1)) == (0, PAGE, None)
    arena.give(0)
    assert arena.take(2 * PAGE) is None
    assert arena.take(PAGE) == 0


def test_views_of_a_place_are_the_same_memory() -> None:
    arena = Arena(mmap.mmap(-1, 2 * PAGE))
    arena.take(1)
    start = arena.take(12)
    assert start == PAGE
    images = arena.images_at(start, (1, 3, 2, 2))
    images[:] = np.arange(12).reshape(images.shape)
    assert bytes(arena.bytes_at(start, 12)) == bytes(range(12))


def test_the_board_is_seen_by_forks() -> None:
    board = Board(2)
    assert (board.engine, board.ready_engine) == (1, 0)
    if not (child := os.fork()):
        board.engine = 7
        board.set_ready(6)
        board.beats[2] = 1.5
        board.arriving[:] = 3, 4
        board.decoding[:] = 5, 2
        board.decoding[1] -= 1
        board.set_reason("a longer one")
        board.set_reason("é" * 5000)
        board.set_reason("no memory")
        os._exit(0)
    os.waitpid(child, 0)
    assert (board.engine, board.ready_engine, board.beats[2], board.beats[0]) == (7, 6, 1.5, 0.0)
    assert (board.arriving.tolist(), board.decoding.tolist(), board.reason) == ([3, 4], [5, 1], "no memory")
    board.forget(0)
    assert (board.arriving.tolist(), board.decoding.tolist()) == ([0, 4], [0, 1])
