"""The thread writes what it is given, within its memory; what it cannot write is dropped and counted."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.log import day_of
from psc_core.errors import UsageError
from psc_core.log.store import Log, days_of, open_log, read_rows
from tests.app.fakes import FakeModel, pixels, png
from tests.app.support import PNG, Running, running, serve_next, until

pytestmark = pytest.mark.anyio

ROWS = 'psc_log_rows_total{model="m",result="%s"}'
IMAGES = 'psc_log_images_total{model="m",result="%s"}'


def log_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "psc-log"}


async def counts(app: Running) -> tuple[float, ...]:
    """Rows written and dropped, images written and dropped."""
    return tuple([await app.metric(name % result) for name in (ROWS, IMAGES) for result in ("written", "dropped")])


async def until_counted(app: Running, wanted: tuple[int, ...]) -> None:
    async with asyncio.timeout(60):
        while await counts(app) != wanted:
            await asyncio.sleep(0.01)


async def send(app: Running, *values: int) -> None:
    for value in values:
        assert (await app.client.post("/predict", content=png(value), headers=PNG)).status_code == 200


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [row for batch in read_rows(open_log(folder), "m") for row in batch.to_pylist()]


async def test_one_file_of_the_rows_of_a_while(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_sample=0) as app:
        await send(app, 0, 255, 70)
        assert rows_in(tmp_path) == [] and app.service.log is not None and app.service.log.held_bytes > 0
        assert await app.metric("psc_log_held_bytes") > 0
    assert [row["label"] for row in rows_in(tmp_path)] == ["dark", "bright", "middle"]
    assert [row["image_path"] is not None for row in rows_in(tmp_path)] == [False, False, True]
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert app.service.log.held_bytes == 0


async def test_rows_are_there_after_a_while(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=0) as app:
        await send(app, 0)
        await until(lambda: len(rows_in(tmp_path)) == 1)
        await send(app, 255)
        await until(lambda: len(rows_in(tmp_path)) == 2)
        await until_counted(app, (2, 0, 0, 0))  # A file has its name before it is counted.


async def test_replaced_models_are_forgotten(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=0, admin_keys="root") as app:
        log = app.service.registry.get().log
        assert log is not None
        source = weakref.ref(log.source)
        del log
        await send(app, 0)
        await until_counted(app, (1, 0, 0, 0))
        serve_next(app, FakeModel("v2"))
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200

        def is_forgotten() -> bool:
            gc.collect()
            return source() is None

        await until(is_forgotten, 60)


async def test_only_what_is_drawn_is_written(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_rows=0.3, log_sample=0.1, log_images="accept:0.2") as app:
        await send(app, *[0] * 100)
    rows = rows_in(tmp_path)
    assert 0 < len(rows) < 100
    assert {(row["sampling_probability"], row["sample_probability"]) for row in rows} == {(0.3, 0.1)}
    assert all(row["image_path"] for row in rows if row["sampled"])
    assert 0 < sum(row["sampled"] for row in rows) <= sum(row["image_path"] is not None for row in rows) < len(rows)


async def test_images_that_are_not_monitored_are_never_of_the_slice(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_sample=1.0) as app:
        for query in ("", "?monitor=false"):
            await app.client.post(f"/predict{query}", content=png(0), headers=PNG)
    assert [(row["sampled"], row["sample_probability"]) for row in rows_in(tmp_path)] == [(True, 1.0), (False, 0.0)]


async def test_full_disk_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, is_full = Log.put, True

    def full(log: Log, name: str, data: Any, **options: Any) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        put(log, name, data, **options)

    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=1.0) as app:
        monkeypatch.setattr(Log, "put", full)
        await send(app, 0, 255)
        await until_counted(app, (0, 2, 0, 2))
        is_full = False  # Room again: the log goes on.
        await send(app, 70)
        await until(lambda: len(rows_in(tmp_path)) == 1)
    assert rows_in(tmp_path)[0]["image_path"] is not None


async def test_bucket_that_hangs_delays_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, hangs, before = threading.Event(), threading.Event(), log_threads()

    def hang(*_: Any, **__: Any) -> None:
        hangs.set()
        check.wait(60)
        raise OSError("timed out")

    settings = {"log_buffer_bytes": 1 << 16, "log_sample": 1.0, "drain_seconds": 0.2}
    async with running(log=str(tmp_path), **settings) as app:
        monkeypatch.setattr(Log, "put", hang)
        await send(app, 0)
        await until(hangs.is_set)
        await send(app, *[0] * 200)  # All answered, though nothing is written.
        assert app.service.log is not None and app.service.log.held_bytes <= 1 << 16
        rows, images = (await counts(app))[1::2]
        assert 0 < rows < 201 and images == 0
    # At the end the rest is lost, within drain_seconds.
    assert f"{ROWS % 'dropped'} 201.0" in app.service.metrics.exposition()[0].decode()
    check.set()
    await until(lambda: not log_threads() - before)


async def test_rows_that_were_given_up_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, hangs, before = threading.Event(), threading.Event(), log_threads()

    def hang(*_: Any, **__: Any) -> None:
        hangs.set()
        check.wait(60)

    async with running(log=str(tmp_path), log_flush_seconds=3600, log_sample=0, drain_seconds=0.2) as app:
        await send(app, 0, 255)
        log = app.service.log
        assert log is not None
        monkeypatch.setattr(Log, "put", hang)
        assert not log.flush(0)
        await until(hangs.is_set)  # Both rows are open, and are being written.
    dropped = f"{ROWS % 'dropped'} 2.0"
    assert dropped in app.service.metrics.exposition()[0].decode()
    check.set()
    await until(lambda: not log_threads() - before)
    assert dropped in app.service.metrics.exposition()[0].decode()


async def test_flush_is_not_done_when_the_one_before_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, check, hangs = Log.put, threading.Event(), threading.Event()

    def hang(log: Log, name: str, data: Any, **options: Any) -> None:
        hangs.set()
        check.wait(60)
        put(log, name, data, **options)

    async with running(log=str(tmp_path), log_flush_seconds=3600, log_sample=0) as app:
        log = app.service.log
        assert log is not None
        monkeypatch.setattr(Log, "put", hang)
        await send(app, 0)
        assert not log.flush(0)
        await until(hangs.is_set)
        await send(app, 255)
        second = asyncio.create_task(asyncio.to_thread(log.flush, 60))
        await asyncio.sleep(0.1)  # So that it asks before the first is done; the other way round shows nothing.
        check.set()
        assert await second
        assert {row["label"] for row in rows_in(tmp_path)} == {"dark", "bright"}


async def test_bug_in_the_thread_ends_neither_log_nor_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=0) as app:
        monkeypatch.setattr("app.log.OpenRows.to_parquet", lambda _: 1 / 0)
        await send(app, 0)
        await until_counted(app, (0, 1, 0, 0))
        monkeypatch.undo()
        await send(app, 0)
        await until(lambda: len(rows_in(tmp_path)) == 1)
        assert app.service.log is not None and app.service.log.held_bytes == 0


async def test_pixels_are_stored_as_a_file(tmp_path: Path) -> None:
    images = {"name": "images", "datatype": "UINT8", "shape": [2, 8, 8, 1]}
    data = [*pixels(10).ravel().tolist(), *pixels(200).ravel().tolist()]
    async with running(log=str(tmp_path), log_sample=1.0) as app:
        answer = await app.client.post("/v2/models/m/infer", json={"inputs": [{**images, "data": data}]})
        assert answer.status_code == 200
    rows = rows_in(tmp_path)
    assert [row["image_index"] for row in rows] == [0, 1]
    assert {Path(row["image_path"]).suffix for row in rows} == {".dib"}
    async with running() as app:
        for row in rows:
            file = (tmp_path / row["image_path"]).read_bytes()
            again = (await app.client.post("/predict", content=file, headers={"content-type": "image/bmp"})).json()
            assert again["predictions"][0]["label"] == row["label"]


async def test_old_days_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "model=m" / "day=2020-01-01"
    old.mkdir(parents=True)
    (old / "part-1.parquet").touch()
    async with running(log=str(tmp_path), log_days=30) as app:
        await until(lambda: not old.exists())
        await send(app, 0)
    today = datetime.now(UTC)
    assert days_of(open_log(tmp_path), "m")[0] in {day_of(int(day.timestamp() * 1e6)) for day in (today, today - DAY)}


DAY = timedelta(days=1)


async def test_reloaded_model_logs_its_own_version(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app:
        await send(app, 0)
        app.models.upcoming = [FakeModel(version="v2")]  # type: ignore[list-item]
        await app.service.reload(None)
        await send(app, 0)
    assert sorted(row["bundle_version"] for row in rows_in(tmp_path)) == ["v1", "v2"]
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == ["v1.json", "v2.json"]
    assert all(len(set(batch["bundle_version"].to_pylist())) == 1 for batch in read_rows(open_log(tmp_path), "m"))


async def test_log_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written to"):
        async with running(log=str(tmp_path / "file")):
            pass
