"""What is too old is removed beside the log, and the removal ends with it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from app.log import LogPruner
from psc_core.log.store import Log, open_log
from tests.app.log.test_writer import rows_in, send
from tests.app.support import running, until

pytestmark = pytest.mark.anyio


class Check:
    """Holds up the removal of files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.is_open, delete = threading.Event(), threading.Event(), Log.delete

        def slow(log: Log, name: str) -> None:
            if name.startswith("images/"):
                self.is_reached.set()
                self.is_open.wait(60)
            delete(log, name)

        monkeypatch.setattr(Log, "delete", slow)


def old_images(folder: Path, count: int) -> list[Path]:
    files = [folder / "images" / "ab" / f"ab{number:062x}.png" for number in range(count)]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.touch()
        os.utime(file, (0, 0))
    return files


async def test_log_is_written_while_old_images_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, files = Check(monkeypatch), old_images(tmp_path, 3)
    settings: dict[str, Any] = {"log_days": 1, "log_flush_seconds": 0.05, "log_sample": 0, "drain_seconds": 0.2}
    async with running(log=str(tmp_path), **settings) as app:
        await until(check.is_reached.is_set)
        await send(app, 0, 255)
        await until(lambda: len(rows_in(tmp_path)) == 2)
        assert all(file.exists() for file in files)
    check.is_open.set()  # The service ended without it.


async def test_removal_ends_after_the_file_it_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, files = Check(monkeypatch), old_images(tmp_path, 3)
    pruner = LogPruner(open_log(tmp_path), 1)
    pruner.start()
    await until(check.is_reached.is_set)
    pruner.end()
    check.is_open.set()
    await until(lambda: not pruner.is_alive())
    assert [file.exists() for file in files] == [False, True, True]


async def test_error_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal times
        times += 1
        raise OSError("gone")

    monkeypatch.setattr("app.log.prune", fail)
    monkeypatch.setattr("app.log.PRUNE_SECONDS", 0.01)
    pruner = LogPruner(open_log(tmp_path), 1)
    pruner.start()
    await until(lambda: times > 1)
    pruner.end()
    await until(lambda: not pruner.is_alive())
    assert "cannot be removed: gone" in caplog.text
