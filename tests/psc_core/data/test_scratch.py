"""Batches kept in a file without a name, and what does not fit."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from psc_core.data import loaders as scratch
from psc_core.data.loaders import scratch_file
from psc_core.errors import DataError, UsageError


def batch(count: int, dtype: type = np.float32) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(count * 6, dtype=dtype).reshape(count, 1, 2, 3)


def test_gives_what_was_appended_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_file("train") as kept:
        for count in (3, 1, 4):
            kept.append(batch(count))
        images = kept.images()
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(images, np.concatenate([batch(3), batch(1), batch(4)]))
    assert not images.flags.writeable
    del images
    gc.collect()


def test_refuses_another_shape_or_type() -> None:
    with scratch_file("train") as kept:
        kept.append(batch(2))
        with pytest.raises(DataError, match=r"train: .* batch 1 has float32 \(1, 2, 2\), those before"):
            kept.append(batch(2)[..., :2])
        with pytest.raises(DataError, match="batch 1 has uint8"):
            kept.append(batch(2, np.uint8))


def test_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * batch(3).nbytes))
    with scratch_file("train") as kept:
        kept.append(batch(3))
        with pytest.raises(UsageError, match=r"train takes .* GiB .*Subset\), or uint8 images with preprocess=…"):
            kept.append(batch(1))
        with pytest.raises(UsageError, match=r"Subset\)$"):
            kept.check_room(10**9, np.dtype(np.uint8))


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    with scratch_file("train") as kept:
        kept.file = Full()  # type: ignore[assignment]
        with pytest.raises(UsageError, match=r"cannot store train in .*: No space left on device; set TMPDIR"):
            kept.append(batch(1))


def test_no_folder_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", _none)
    with pytest.raises(UsageError, match="TMPDIR"), scratch_file("images"):
        pass


def _none() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
