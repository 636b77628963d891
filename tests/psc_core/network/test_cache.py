"""The cache is read only where nobody else can have written to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psc_core.network.cache import read_checked, write_checked


def test_a_cache_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "psc"
    folder.mkdir(mode=0o700)
    file = folder / "key.onnx"
    write_checked(file, b"graph")
    assert read_checked(file) == b"graph" and not caplog.records
    file.chmod(0o666)
    assert read_checked(file) is None
    file.chmod(0o600)
    folder.chmod(0o777)
    assert read_checked(file) is None
    folder.chmod(0o700)
    assert read_checked(file) == b"graph" and len(caplog.records) == 2
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_checked(file) is None
    monkeypatch.undo()
    (folder / "link.onnx").symlink_to(file)
    os.mkfifo(folder / "pipe.onnx")
    assert read_checked(folder / "link.onnx") is None and read_checked(folder / "pipe.onnx") is None
