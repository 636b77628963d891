"""Files appear whole, in a folder and in a bucket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyarrow import fs

from psc_core.errors import UsageError
from psc_core.log.store import Log, open_log, open_to_write


def test_files_of_a_folder(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    assert (list(log.names()), log.folders()) == ([], [])
    log.put("model=m/part-1.parquet", b"one")
    log.put("labels/part-2.parquet", b"two")
    (tmp_path / "log" / "labels" / ".part-3.parquet.x").write_bytes(b"torn")
    assert [name for name, _ in log.names()] == ["labels/part-2.parquet", "model=m/part-1.parquet"]
    assert [name for name, _ in log.names("labels", suffix=".json")] == []
    assert (log.folders(), log.get("labels/part-2.parquet")) == (["labels", "model=m"], b"two")
    log.delete("labels/part-2.parquet")
    assert [name for name, _ in log.names()] == ["model=m/part-1.parquet"]
    with pytest.raises(FileNotFoundError):
        log.get("labels/part-2.parquet")


def test_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    log.put("images/ab/x.png", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        log.put("images/ab/x.png", b"new")
    assert [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()] == [b"old"]


def test_only_folders_and_buckets_are_logs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="s3://BUCKET"):
        open_log("gs://bucket/log")
    for text in ("s3://", "s3://bucket/x?allow_bucket_creation=true"):
        with pytest.raises(UsageError, match="expected s3://BUCKET/PREFIX with at most"):
            open_log(text)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        open_to_write(tmp_path / "file")
    assert open_to_write(tmp_path / "log").is_folder
    assert list((tmp_path / "log").iterdir()) == []


def test_processes_that_start_together_share_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delete, has_raced = Log.delete, False

    def race(log: Log, name: str) -> None:
        nonlocal has_raced
        if not has_raced:
            has_raced = True
            open_to_write(tmp_path)
        delete(log, name)

    monkeypatch.setattr(Log, "delete", race)
    open_to_write(tmp_path)
    assert has_raced and list(tmp_path.iterdir()) == []


def test_files_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    moto = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"endpoint_override=http://{host}:{port}&region=us-east-1"
        fs.S3FileSystem(
            region="us-east-1", scheme="http", endpoint_override=f"{host}:{port}", allow_bucket_creation=True
        ).create_dir("bucket")
        bucket = open_log(f"s3://bucket/logs?{endpoint}")
        bucket.put("images/ab/x.png", b"one")
        bucket.put("images/ab/x.png", b"two")
        assert (bucket.where, bucket.is_folder) == ("s3://bucket/logs", False)
        assert [name for name, _ in bucket.names("images")] == ["images/ab/x.png"]
        assert (bucket.folders(), bucket.get("images/ab/x.png")) == (["images"], b"two")
        bucket.delete("images/ab/x.png")
        assert list(bucket.names("images")) == []
        with pytest.raises(OSError):
            open_log(f"s3://other/logs?{endpoint}").put("x", b"")
    finally:
        server.stop()
