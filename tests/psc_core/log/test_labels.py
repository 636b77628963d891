"""The last label on an image wins, by whichever request it came, and holds for the rows of its model alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psc_core.errors import DataError
from psc_core.log.labels import Label, Labels, joined, label_files, read_label_file, read_labels, write_labels
from psc_core.log.store import label_schema, read_rows
from tests.psc_core.log.support import TIME, digest, make_log, put_rows, row

OF_ROW = Label("r0", 0, digest(0), "label", "cat", "a person", TIME)


def test_last_verdict_wins() -> None:
    later = replace(OF_ROW, kind="cannot_tell", label=None, time=TIME + timedelta(seconds=1))
    of_image = Label(None, None, digest(0), "label", "dog", "folder", TIME + timedelta(seconds=2))
    for given in ([OF_ROW, later], [later, OF_ROW]):
        assert Labels(given).of("m", "r0", 0, digest(0)) == later
    labels = Labels([of_image, OF_ROW])
    assert labels.of("m", "r0", 0, digest(0)) == of_image
    assert labels.of("m", "r7", 3, digest(0)) == of_image
    assert labels.of("m", "r0", 0, None) == OF_ROW
    assert labels.of("m", "r1", 0, digest(1)) is labels.of("m", "r1", 0, None) is None


def test_verdict_holds_for_the_same_bytes_in_any_request_to_its_model() -> None:
    labels = Labels([replace(OF_ROW, model="m")])
    assert labels.of("m", "r7", 3, digest(0)) == labels.of("m", "r0", 0, None) == replace(OF_ROW, model="m")
    assert labels.of("other", "r7", 3, digest(0)) is None
    assert Labels([OF_ROW]).of("m", "r7", 3, digest(0)) is None  # It does not say which model it is of.


def test_labels_beside_rows(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(9, image_sha256=digest(2))])
    write_labels(log, [OF_ROW])
    write_labels(log, [Label(None, None, digest(2), "none_of_the_classes", None, "folder", TIME)])
    labels = read_labels(log)
    assert [OF_ROW] in [read_label_file(log, name) for name, _ in label_files(log)]
    found = {row["request_id"]: row for batch in joined(read_rows(log, "m"), labels, "m") for row in batch.to_pylist()}
    assert {name: (row["kind"], row["true_label"]) for name, row in found.items()} == {
        "r0": ("label", "cat"), "r1": (None, None), "r2": ("none_of_the_classes", None),
        "r9": ("none_of_the_classes", None),
    }  # fmt: skip


def test_labels_from_before_the_column_model_are_read(tmp_path: Path) -> None:
    log = make_log(tmp_path, 1)
    old = {name: cell for name, cell in vars(OF_ROW).items() if name != "model"}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([old], schema=pa.schema(list(label_schema())[:-1])), sink)
    log.put("labels/part-old.parquet", sink.getvalue())
    write_labels(log, [replace(OF_ROW, request_id="r1", model="m")])
    labels = read_labels(log)
    assert (labels.of("m", "r0", 0, None), labels.of("m", "r1", 0, None)) == (
        OF_ROW, replace(OF_ROW, request_id="r1", model="m"),
    )  # fmt: skip


def test_damaged_file_is_named(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.put("labels/part-z.parquet", b"torn")
    with pytest.raises(DataError, match=r"part-z\.parquet is not a file of labels"):
        read_labels(log)
