"""A log's files, rows, images and models."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unicodedata import normalize
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from pyarrow import fs

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import DataError, UsageError
from psc_core.images.decode import DEFAULT_MAX_PIXELS, IMAGE_FORMATS
from psc_core.images.preprocess import PRESETS
from psc_core.log.erase import erase
from psc_core.log.labels import Label, read_labels, write_labels
from psc_core.log.review import ReviewQueue
from psc_core.log.store import (
    INPUT,
    Log,
    LoggedImages,
    days_of,
    extension_of,
    file_of,
    find_row,
    image_path,
    is_stored,
    logged_model,
    models_in,
    open_log,
    open_logged_image,
    open_to_write,
    pixels_of,
    read_model,
    read_rows,
    row_schema,
    scores_in,
)
from tests.encoded import encode
from tests.logged import Logged, png, write_log
from tests.psc_core.log.support import CLASSES, TIME, add_values, digest, make_log, put_rows, row


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
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
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


def test_files_of_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "logs" / "images" / "ab").mkdir(parents=True)  # A bucket has no folders to make.
    bucket = Log("s3://bucket/logs", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "logs")
    bucket.put("images/ab/x.png", b"one")
    bucket.put("images/ab/x.png", b"two")
    assert not bucket.is_folder and [name for name, _ in bucket.names("images")] == ["images/ab/x.png"]
    assert (bucket.folders(), bucket.get("images/ab/x.png")) == (["images"], b"two")
    bucket.delete("images/ab/x.png")
    assert list(bucket.names("images")) == [] and bucket.written("images/ab/x.png") is None


def test_labels_of_a_model(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    add_values(log)
    assert (read_model(log, "v1").classes, read_model(log, "v1").check_label("cat")) == (CLASSES, "cat")
    with pytest.raises(DataError, match="one of the model's classes"):
        read_model(log, "v1").check_label("dgo")
    assert read_model(log, "w1").check_label(" 7 ") == "7.0"
    for text in ("cat", "nan", "inf", ""):
        with pytest.raises(DataError, match="a number for angle"):
            read_model(log, "w1").check_label(text)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"target": 3, "classes": []}', b'{"task": "other"}'])
def test_what_cannot_be_used_is_named(tmp_path: Path, data: bytes) -> None:
    log = make_log(tmp_path)
    log.put("models/v1.json", data)
    with pytest.raises(DataError, match=r"models/v1\.json"):
        read_model(log, "v1")
    with pytest.raises(DataError, match=r"has no models/v2\.json"):
        read_model(log, "v2")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_label_is_a_class_in_either_form_of_its_name(tmp_path: Path, form: Any) -> None:
    log = make_log(tmp_path)
    document = {"version": "v3", "task": "classification", "classes": [normalize(form, "cafe\u0301"), "tea"]}
    log.put("models/v3.json", json.dumps(document).encode())
    model = read_model(log, "v3")
    assert model.classes == ("caf\u00e9", "tea")
    for text in ("caf\u00e9", "cafe\u0301", " cafe\u0301\u00a0"):
        assert model.check_label(text) == "caf\u00e9"
    with pytest.raises(DataError, match="did you mean 'tea'"):
        model.check_label("Tea")


def test_rows_of_a_model(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(5, bundle_version="v2", sampled=True)], day="2026-03-02")
    add_values(log)
    assert (models_in(log), days_of(log, "m"), days_of(log, "x")) == (["m", "v"], ["2026-03-01", "2026-03-02"], [])

    def ids(**options: Any) -> list[str]:
        return [row for batch in read_rows(log, "m", **options) for row in batch["request_id"].to_pylist()]

    assert ids() == ["r0", "r1", "r2", "r5"]
    assert ids(sampled=True) == ids(days=["2026-03-02"]) == ["r5"]
    (values,) = read_rows(log, "v")
    assert "mean" in scores_in(values.schema) and values["probabilities"].null_count == 1
    assert scores_in(row_schema(CLASSIFICATION_SCORES)) == list(CLASSIFICATION_SCORES)
    assert next(iter(read_rows(log, "m", columns=["label", "time"]))).schema.names == ["label", "time"]


def test_find_row(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    path = image_path(digest(2), "png")
    assert find_row(log, "r2", 0) == {
        "image_sha256": digest(2), "image_path": path, "bundle_version": "v1", "model": "m"
    }  # fmt: skip
    assert find_row(log, "r2", 1) is None and find_row(log, "r", 0) is None
    put_rows(log, [row(8)], day="2026-03-02")
    searched: dict[str, str] = {}
    assert find_row(log, "r2", 0, ends=0.0, searched=searched) is None and searched == {}
    assert find_row(log, "r", 0, searched=searched) is None
    assert [*searched.values()] == ["2026-03-02", "2026-03-01"]
    assert find_row(log, "r2", 0, searched=searched) is None  # No file is read twice.


def test_a_model_is_named_where_there_are_several(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    assert logged_model(log, "m") == logged_model(log, None) == "m"
    with pytest.raises(UsageError, match="--model"):
        logged_model(log, "x")
    for name in (None, "digits"):
        with pytest.raises(UsageError, match="psc-serve --log"):
            logged_model(open_log(tmp_path / "none"), name)


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.put("model=m/day=2026-03-01/part-z.parquet", b"PAR1 torn")
    with pytest.raises(DataError, match=r"part-z\.parquet is not a file of rows"):
        list(read_rows(log, "m"))


def test_files_with_damaged_pages_are_named(tmp_path: Path) -> None:
    """Their footer is whole, so pyarrow opens them."""
    log = make_log(tmp_path, 200)
    write_labels(log, [Label(f"r{n}", 0, digest(n), "label", "cat", "x", TIME) for n in range(200)])
    for folder in ("model=m", "labels"):
        ((name, _),) = log.names(folder)
        content = bytearray(log.get(name))
        content[100 : len(content) // 3] = bytes(len(content) // 3 - 100)
        log.put(name, bytes(content))
        reads = {
            "model=m": [lambda: list(read_rows(log, "m")), lambda: erase(log, digest(1))],
            "labels": [lambda: read_labels(log), lambda: ReviewQueue(log).newest(9, 9.0, ["accept"], None)],
        }
        for read in reads[folder]:
            with pytest.raises(DataError, match=f"{name} is not a file of"):
                read()


@pytest.mark.parametrize("name", IMAGE_FORMATS)
def test_extension_of_every_format_that_is_decoded(name: str) -> None:
    extension = extension_of(encode(Image.new("L", (4, 4)), name))
    assert Image.registered_extensions()[f".{extension}"] == name
    assert extension_of(b"?") == "img"


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_a_file_that_gives_them_back(channels: int) -> None:
    pixels = np.arange(channels * 15, dtype=np.uint8).reshape(channels, 3, 5)
    assert np.array_equal(pixels_of(file_of(pixels)), pixels)


def test_digest_of_pixels_stays_the_same() -> None:
    digest = hashlib.sha256(file_of(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))).hexdigest()
    assert digest == "e53b3843a04b72edfb0349945cd760b4b8d5a19e0a2b06ef3ef6f8ff8a69c645"


def test_reads_what_was_stored_and_nothing_else(tmp_path: Path) -> None:
    pixels = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)
    image = Logged(png(pixels))
    log = write_log(tmp_path, [image])
    path = image_path(image.sha256, "png")
    source = LoggedImages(log, [path])
    assert len(source) == 1 and source.fingerprint(0) == path.encode()
    assert np.array_equal(source.read(0, PRESETS["mnist"])[0], pixels)
    (tmp_path / path).write_bytes(png(pixels + 1))
    with pytest.raises(DataError, match="was changed since it was logged"):
        source.read(0, PRESETS["mnist"])
    (tmp_path / path).unlink()
    with pytest.raises(DataError, match=r"cannot read the image .*psc-log delete"):
        source.read(0, PRESETS["mnist"])


def test_a_network_input_is_neither_resized_nor_cropped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224), dtype=np.uint8)
    file, log = file_of(pixels), open_log(tmp_path)
    paths = [image_path(hashlib.sha256(file).hexdigest(), extension) for extension in (INPUT, "bmp")]
    for path in paths:
        log.put(path, file)
    source = LoggedImages(log, paths)
    assert np.array_equal(source.read(0, PRESETS["imagenet"]), pixels)
    assert not np.array_equal(source.read(1, PRESETS["imagenet"]), pixels)
    with pytest.raises(DataError, match=r"reads \(1, 28, 28\)"):
        source.read(0, PRESETS["mnist"])


def test_an_image_that_only_the_service_was_told_to_allow_is_read(tmp_path: Path) -> None:
    pixels = np.zeros((5001, 5000), np.uint8)
    assert pixels.size > DEFAULT_MAX_PIXELS
    image = Logged(png(pixels))
    source = LoggedImages(write_log(tmp_path, [image]), [image_path(image.sha256, "png")])
    assert source.read(0, PRESETS["mnist"]).shape == (1, 28, 28)


def test_a_path_that_is_none_of_a_log_is_not_followed() -> None:
    digest = "ab" * 32
    assert is_stored(digest, f"images/ab/{digest}.png")
    for path in (None, "", "../secret", f"images/ab/../../{digest}.png", f"/images/ab/{digest}.png", "images/ab/x.png"):
        assert not is_stored(digest, path)
    assert not is_stored(None, "images/ab/x.png")


def test_opens_an_image_by_its_name_and_no_other_file(tmp_path: Path) -> None:
    content = png(np.zeros((4, 4), np.uint8))
    image = Logged(content)
    log = write_log(tmp_path, [image])
    name = f"{image.sha256}.png"
    file, size = open_logged_image(log, name)
    with file:
        assert (file.read(), size) == (content, len(content))
    folder = tmp_path / "images" / image.sha256[:2]
    other = f"{image.sha256[:2]}{'0' * 62}"
    (folder / f"{other}.png").symlink_to(tmp_path / "labels")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / f"{other}.gif").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / f"{other}.bmp")
    others = (f"{image.sha256}.gif", *(f"{other}.{suffix}" for suffix in ("png", "gif", "bmp")))
    for each in (*others, "x.png", "", f"../../{name}", f"{name}\n"):
        with pytest.raises(FileNotFoundError):
            open_logged_image(log, each)
    (folder / name).write_bytes(content + b"more")
    with pytest.raises(FileNotFoundError):
        open_logged_image(log, name)
