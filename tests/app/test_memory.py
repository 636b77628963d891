"""One budget for everything that requests hold, and readiness by the memory of the process."""

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from app import memory
from app.channel import Board
from app.errors import NotReady, TooManyRequests
from app.memory import COPIES, PIXEL_BYTES, MemoryBudget, process_memory
from app.service import memory_for
from app.settings import Settings
from tests.app.fakes import png
from tests.app.http.support import check_predictions, check_problem
from tests.app.support import PNG, Running, running, until


def budget(total: int = 1000, *, max_pixels: int = 25) -> MemoryBudget:
    return MemoryBudget(total, process_memory(), max_pixels=max_pixels)


def test_what_does_not_fit_is_refused_and_decoding_has_room_of_its_own() -> None:
    held = budget()
    assert held.largest_body == (1000 - 25 * PIXEL_BYTES) // COPIES
    held.take(800)
    with pytest.raises(TooManyRequests):
        held.take(1)
    with held.decoding(200):
        pass
    held.give(800)
    held.take(800)


def test_what_an_image_takes_beyond_its_room_is_known_to_other_processes() -> None:
    counts = Board(2).memory
    fronts = [MemoryBudget(100, 1 << 40, max_pixels=25, counts=counts, place=place) for place in (0, 1)]
    counts[-1] = 140
    with fronts[0].decoding(80):
        fronts[0].take(50)  # Its budget counts no more of an image than is kept for it.
        fronts[0].give(50)
        with pytest.raises(NotReady, match="this takes 0 MiB"), fronts[1].decoding(80):
            pass
    with fronts[1].decoding(80):
        pass
    assert sum(counts[:-1]) == 0


def test_an_image_larger_than_its_room_is_decoded_alone() -> None:
    held = budget(100)
    held.take(50)
    with held.decoding(80_000), pytest.raises(TooManyRequests):
        held.take(1)


def test_a_second_image_waits_where_the_bodies_of_others_would_be_refused() -> None:
    held, begun = budget(), threading.Event()

    def decode() -> None:
        with held.decoding(200):
            begun.set()

    held.take(500)
    with ThreadPoolExecutor(1) as pool:
        with held.decoding(200):
            second = pool.submit(decode)
            held.take(100)
            assert not begun.wait(0.1)
        second.result(timeout=30)
    held.give(500)
    with held.decoding(200):
        decode()


def test_the_images_of_a_large_request_do_not_overtake_one_that_waits() -> None:
    held, seen = budget(400), list[str]()

    def decode() -> None:
        with held.decoding(200):
            seen.append("other")

    with ThreadPoolExecutor(1) as pool:
        with held.decoding(200):
            other = pool.submit(decode)
            while not held._line:
                time.sleep(0.001)
        with held.decoding(200):
            seen.append("next")
        other.result(timeout=30)
    assert seen == ["other", "next"]


def test_decoding_waits_for_others_that_decode() -> None:
    held = budget()
    held.take(700)
    inside, go_on, seen = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        with held.decoding(200):
            inside.set()
            go_on.wait()
            seen.append("first")

    def second() -> None:
        with held.decoding(160):
            seen.append("second")

    with ThreadPoolExecutor(2) as pool:
        pool.submit(first)
        inside.wait()
        pool.submit(second)
        go_on.set()
    assert seen == ["first", "second"]


def groups(folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: str) -> None:
    """Control groups with limits, by the path of their files, ``__`` between its parts."""
    monkeypatch.setattr(memory, "CGROUPS", folder)
    for path, limit in limits.items():
        file = folder / path.replace("__", "/").replace("_max", ".max").replace("_limit", ".limit_in_bytes")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit)
        (file.parent / file.name.replace(".max", ".current").replace("limit", "usage")).write_text("0")


def paths(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = folder / "of-this-process", Path.read_text
    file.write_text(text)
    replaced = lambda path, *rest, **more: real(file if str(path) == "/proc/self/cgroup" else path, *rest, **more)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", replaced)


@pytest.mark.parametrize(
    ("line", "inside"),
    [
        ("0::/pod/container", {"pod__memory_max": "4000", "pod__container__memory_max": "max"}),
        ("0::/seen/from/outside", {"memory_max": "4000"}),
        ("4:memory:/pod", {"memory__pod__memory_limit": "4000", "memory__memory_limit": str((1 << 63) - 4096)}),
        ("5:cpu:/pod\n4:memory,blkio:/seen/from/outside", {"memory__memory_limit": "4000"}),
    ],
    ids=["version 2, of the parent", "version 2, the root", "version 1", "version 1, the root"],
)
def test_a_control_group_bounds_the_budget(
    line: str, inside: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups(tmp_path, monkeypatch, **inside)
    paths(line, tmp_path, monkeypatch)
    assert MemoryBudget(1 << 30, process_memory(), max_pixels=1).total == 1000
    assert MemoryBudget(100, process_memory(), max_pixels=1).total == 100


def test_no_request_gets_more_than_the_process_may_have_before_it_is_measured() -> None:
    for fronts in (0, 2):
        board = Board(fronts)
        budget = memory_for(Settings(), board)
        with pytest.raises(NotReady):
            budget.check(process_memory() + 1)
        board.memory[-1] = 5  # as an engine measured it before another one took its place
        memory_for(Settings(), board)
        assert board.memory[-1] == 5


@pytest.mark.parametrize(
    ("line", "folder", "names", "stat"),
    [
        ("0::/pod", "pod", ("memory.max", "memory.current"), "anon 700\nactive_file 50\ninactive_file 2000\n"),
        (
            "4:memory:/pod",
            "memory/pod",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "inactive_file 1\ntotal_inactive_file 2000\n",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_page_cache_of_a_control_group_is_free(
    line: str, folder: str, names: tuple[str, str], stat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / folder
    group.mkdir(parents=True)
    for name, value in zip(names, ("4000", "2750"), strict=True):
        (group / name).write_text(value)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    paths(line, tmp_path, monkeypatch)
    assert memory.limits()[1:] == [(4000, 2750)]
    (group / "memory.stat").write_text(stat)
    assert memory.limits()[1:] == [(4000, 750)]


def test_a_process_that_is_nearly_full_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held = budget()
    held.should_release()
    held.take(10)
    held.process_bytes = 1 << 20
    held.should_release()
    with pytest.raises(NotReady):
        held.take(1)
    held.process_bytes = 1 << 50
    held.should_release()
    held.take(1)


def test_an_image_that_would_take_the_last_of_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 800_000)
    held = MemoryBudget(200_000, 1_000_000, max_pixels=1_000_000)  # half of it for an image of 12,500 pixels or more
    held.should_release()
    with pytest.raises(NotReady, match="may take 0 MiB more"), held.decoding(100_001):
        pass
    assert held.held == 0
    with held.decoding(100_000):
        assert held.held == 100_000


def test_what_requests_hold_counts_once_when_the_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    mb, measured = 1_000_000, iter([600, 600, 700, 800, 850])
    monkeypatch.setattr(memory, "resident_bytes", lambda: next(measured) * mb)
    held = MemoryBudget(1000 * mb, 4000 * mb, max_pixels=0)
    held.process_bytes = 1000 * mb
    held.should_release()
    held.take(200 * mb)
    for _ in range(3):  # It arrives.
        held.should_release()
        held.take(100 * mb)
        held.give(100 * mb)
        with pytest.raises(NotReady):
            held.take(100 * mb + 1)
    held.should_release()  # More than it was to be
    with pytest.raises(NotReady):
        held.take(50 * mb + 1)
    held.take(50 * mb)


def test_freed_memory_is_returned_where_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 100.0, 700 << 20
    monkeypatch.setattr("app.memory.time.monotonic", lambda: now)
    monkeypatch.setattr(memory, "resident_bytes", lambda: used)
    held = MemoryBudget(1 << 20, 1 << 30, max_pixels=0)
    now = 200.0
    assert not held.should_release()
    used = 900 << 20
    assert [held.should_release(), held.should_release()] == [True, False]
    assert not held.shortage


def test_what_one_process_holds_another_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)
    counts = Board(2).memory
    engine, *fronts = (MemoryBudget(800, 1_000_000, max_pixels=0, counts=counts, place=place) for place in (2, 0, 1))
    fronts[0].take(700)  # Nobody has measured yet.
    engine.process_bytes = 1000
    engine.should_release()
    fronts[1].take(200)
    with pytest.raises(NotReady):
        fronts[1].take(1)
    fronts[0].give(700)
    fronts[1].take(600)
    assert [each.held for each in (engine, *fronts)] == [0, 0, 800]


def test_without_a_file_descriptor_the_last_measure_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    held = budget()
    held.process_bytes = 1 << 20
    held.should_release()
    monkeypatch.setattr(memory, "resident_bytes", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    assert not held.should_release()
    with pytest.raises(NotReady):
        held.take(1)


def test_freed_memory_is_returned_once_much_less_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("app.memory.time.monotonic", lambda: now)
    held = budget(1 << 30)
    held.take(memory.RELEASE_BYTES)
    now = 100.0
    assert not held.should_release()
    held.give(memory.RELEASE_BYTES)
    assert [held.should_release(), held.should_release()] == [True, False]
    held.take(memory.RELEASE_BYTES)
    held.give(memory.RELEASE_BYTES)
    assert not held.should_release()
    now = 200.0
    assert held.should_release()


@pytest.mark.anyio
async def test_readiness_falls_and_work_is_refused_while_memory_is_short(app: Running) -> None:
    real = app.service.memory.process_bytes
    app.service.memory.process_bytes = 1 << 20

    async def ready(status: int) -> httpx.Response:
        answer: httpx.Response = await app.client.get("/readyz")
        while answer.status_code != status:
            await asyncio.sleep(0.01)
            answer = await app.client.get("/readyz")
        return answer

    assert "MiB of memory" in (await ready(503)).json()["reasons"]["service"]
    check_problem(await app.client.post("/predict", content=png(3), headers=PNG), 503, "not-ready")
    assert (await app.client.get("/healthz")).status_code == 200
    app.service.memory.process_bytes = real
    await ready(200)
    check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])


@pytest.mark.anyio
@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_all_is_given_back(inline: int) -> None:
    async with running(inline_decode_bytes=inline) as app:
        held: Callable[[], int] = lambda: app.service.memory.held  # noqa: E731
        check_predictions(await app.client.post("/predict", content=png(3), headers=PNG), [3])
        check_problem(await app.client.post("/predict", content=b"x" * 999, headers=PNG), 415, "unsupported-image")
        await until(lambda: held() == 0)
