"""An image is removed wherever it is; what is too old goes, and nothing that a row needs."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from psc_core.errors import DataError, UsageError
from psc_core.log.erase import Erased, Pruned, erase, prune
from psc_core.log.labels import Label, read_labels, write_labels
from psc_core.log.rows import read_rows
from psc_core.log.schema import row_schema
from psc_core.tasks.classification.answer import SCORES
from tests.psc_core.log.support import TIME, digest, make_log, put_rows, row


def test_erased_image_is_nowhere(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(7, image_sha256=digest(1), image_path=None)], model="other")
    write_labels(log, [Label("r1", 0, None, "label", "cat", "x", TIME)])  # By request alone.
    write_labels(log, [Label(None, None, digest(n), "label", "cat", "x", TIME) for n in (0, 1)])
    assert erase(log, digest(1).upper()) == Erased(files=1, labels=2, rows=2)
    assert [name for name, _ in log.names() if digest(1) in name] == []
    assert all(digest(1).encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    rows = {each["request_id"]: each for batch in read_rows(log, "m") for each in batch.to_pylist()}
    assert rows["r1"] == row(1, image_sha256=None, image_path=None)
    assert rows["r0"] == row(0)
    assert next(iter(read_rows(log, "m"))).schema.equals(row_schema(SCORES))
    labels = read_labels(log)
    assert labels.of("m", "r1", 0, None) is None and labels.of("m", "r0", 0, digest(0)) is not None
    assert erase(log, digest(1)) == Erased()


def test_what_is_no_digest_or_no_log(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    for text in ("", "ab", "../" * 22, "x" * 64):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            erase(log, text)
    log.put("model=m/day=2026-03-01/part-z.parquet", b"torn")
    with pytest.raises(DataError, match="part-z"):
        erase(log, digest(1))


def test_old_days_go(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(4)], day="2026-03-08")
    write_labels(log, [Label("r0", 0, None, "label", "cat", "x", TIME)])
    write_labels(log, [Label("r4", 0, None, "label", "cat", "x", TIME)], "labels/part-new.parquet")
    old = datetime(2026, 3, 1, 12, tzinfo=UTC)
    for file in tmp_path.rglob("*"):
        is_new = digest(4) in file.name or "new" in file.name
        os.utime(file, (time := (old + timedelta(days=7 * is_new)).timestamp(), time))
    assert prune(log, 10, datetime(2026, 3, 10, tzinfo=UTC)) == Pruned()
    assert prune(log, 7, datetime(2026, 3, 9, 1, tzinfo=UTC)) == Pruned(row_files=1, images=3, label_files=1)
    names = [name for name, _ in log.names() if not name.startswith("model=")]
    assert names == [row(4)["image_path"], "labels/part-new.parquet", "models/v1.json"]
    assert [batch["request_id"].to_pylist() for batch in read_rows(log, "m")] == [["r4"]]
    assert not (tmp_path / "model=m" / "day=2026-03-01").exists()
