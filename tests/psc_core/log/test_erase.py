"""An image is removed wherever it is; what is too old goes, and nothing that a row needs."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyarrow import fs

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import DataError, UsageError
from psc_core.log.erase import Erased, Pruned, erase, prune
from psc_core.log.labels import Label, label_files, read_label_file, read_labels, write_labels
from psc_core.log.store import Log, open_log, read_rows, row_schema
from tests.psc_core.log.support import TIME, content, digest, make_log, put_rows, row


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
    assert next(iter(read_rows(log, "m"))).schema.equals(row_schema(CLASSIFICATION_SCORES))
    labels = read_labels(log)
    assert labels.of("m", "r1", 0, None) is None and labels.of("m", "r0", 0, digest(0)) is not None
    assert erase(log, digest(1)) == Erased()


def test_image_that_was_never_complete_is_erased(tmp_path: Path) -> None:
    """A process that dies while it writes leaves a name with a dot, which nobody reads."""
    log = make_log(tmp_path, 2)
    folder = tmp_path / "images" / digest(1)[:2]
    own, other = folder / f".{digest(1)}.png.0123", folder / f".{digest(1)[:2]}{'0' * 62}.png.0123"
    rows = tmp_path / "model=m" / "day=2026-03-01" / ".part-1.parquet.0123"  # May name the image.
    for file in (own, other, rows):
        file.write_bytes(content(1))
    os.utime(rows, (time := (datetime.now(UTC) - timedelta(hours=2)).timestamp(), time))
    assert erase(log, digest(1)) == Erased(files=2, rows=1)
    assert [file.exists() for file in (own, other, rows)] == [False, True, False]


def test_files_that_were_never_complete_are_pruned_after_an_hour(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    now = datetime.now(UTC)
    for folder in ("images/ab", "labels", f"model=m/day={now.date()}", "models"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, hours in ((".old", 2), (".new", 0)):
            file = tmp_path / folder / name
            file.touch()
            os.utime(file, (time := (now - timedelta(hours=hours)).timestamp(), time))
    assert prune(log, 7, now) == Pruned(partial=4)
    assert {file.name for file in tmp_path.rglob(".*")} == {".new"}


def test_image_that_a_new_row_names_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may store an old image again after it was listed."""
    log = make_log(tmp_path, 3)
    first, second, third = sorted(file for file in (tmp_path / "images").rglob("*.png"))
    for file in (first, second, third):
        os.utime(file, (0, 0))
    delete = Log.delete

    def slow(log: Log, name: str) -> None:
        second.touch()
        third.unlink(missing_ok=True)  # Another process removes too.
        delete(log, name)

    monkeypatch.setattr(Log, "delete", slow)
    assert prune(log, 7, datetime(2026, 3, 8, 1, tzinfo=UTC)).images == 1
    assert [file.exists() for file in (first, second, third)] == [False, True, False]


def test_labels_beside_erased_ones_grow_no_younger(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    write_labels(log, [Label(f"r{n}", 0, digest(n), "label", "cat", "x", TIME) for n in range(3)])
    ((name, _),) = label_files(log)
    os.utime(tmp_path / name, (time := TIME.timestamp(), time))
    for n in (0, 1):  # Again, of the file that the first one wrote.
        assert erase(log, digest(n)).labels == 1
    ((name, written),) = label_files(log)
    assert [each.request_id for each in read_label_file(log, name)] == ["r2"] and written > TIME
    first = TIME.date() + timedelta(days=1)
    assert prune(log, 1, datetime(first.year, first.month, first.day, 23, tzinfo=UTC)).label_files == 0
    assert prune(log, 1, datetime(first.year, first.month, first.day + 1, tzinfo=UTC)).label_files == 1


def test_what_is_no_digest_or_no_log(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    for text in ("", "ab", "../" * 22, "x" * 64):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            erase(log, text)
    log.put("model=m/day=2026-03-01/part-z.parquet", b"torn")
    with pytest.raises(DataError, match="part-z"):
        erase(log, digest(1))
    with pytest.raises(UsageError, match="no folder"):
        erase(open_log(tmp_path / "mistyped"), digest(1))


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


def test_images_erased_at_the_same_time_are_all_erased(tmp_path: Path) -> None:
    """Each rewrites the files that the other has read."""
    log = make_log(tmp_path, 6)
    for _ in range(20):
        put_rows(log, [row(index) for index in range(6)])
    write_labels(log, [Label(None, None, digest(n), "label", "cat", "x", TIME) for n in range(6)])
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda n: erase(log, digest(n)), range(4)))
    assert done == [Erased(files=1, labels=1, rows=1)] * 4
    left = [sha256 for batch in read_rows(log, "m") for sha256 in batch["image_sha256"].to_pylist() if sha256]
    assert {*left} == {digest(4), digest(5)}


def test_in_a_bucket_a_second_one_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path / "log", 2)
    (tmp_path / "log" / "erasing").mkdir()  # A bucket has no folders to make.
    bucket = Log("s3://bucket/log", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "log")
    bucket.put("erasing/other", b"")
    with pytest.raises(UsageError, match="s3://bucket/log/erasing/other"):
        erase(bucket, digest(1))
    bucket.delete("erasing/other")
    assert erase(bucket, digest(1)) == Erased(files=1, rows=1)
    assert [name for name, _ in bucket.names("erasing")] == []


def test_what_is_pruned_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, get = make_log(tmp_path, 2), Log.get
    for _ in range(2):
        put_rows(log, [row(1)])
        write_labels(log, [Label(None, None, digest(1), "label", "cat", "x", TIME)])
    gone: set[str] = set()

    def pruned(log: Log, name: str) -> bytes:
        kind = name.partition("/")[0]
        if kind not in gone:  # The first one of rows, and of labels.
            gone.add(kind)
            log.delete(name)
        return get(log, name)

    monkeypatch.setattr(Log, "get", pruned)
    done = erase(log, digest(1))
    assert gone == {"model=m", "labels"} and done.labels == 1
    assert all(digest(1).encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
