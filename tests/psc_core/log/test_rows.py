"""Rows are streamed: all or some columns, of a model, a bundle, the slice, a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import DataError, UsageError
from psc_core.log.store import days_of, find_row, logged_model, models_in, open_log, read_rows, row_schema, scores_in
from tests.psc_core.log.support import add_values, digest, make_log, put_rows, row


def test_rows_of_a_model(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(5, bundle_version="v2", sampled=True)], day="2026-03-02")
    add_values(log)
    assert (models_in(log), days_of(log, "m"), days_of(log, "x")) == (["m", "v"], ["2026-03-01", "2026-03-02"], [])
    ids = lambda **options: [id for batch in read_rows(log, "m", **options) for id in batch["request_id"].to_pylist()]  # noqa: E731
    assert ids() == ["r0", "r1", "r2", "r5"]
    assert ids(sampled=True) == ids(days=["2026-03-02"]) == ["r5"]
    (values,) = read_rows(log, "v")
    assert "mean" in scores_in(values.schema) and values["probabilities"].null_count == 1
    assert scores_in(row_schema(CLASSIFICATION_SCORES)) == list(CLASSIFICATION_SCORES)
    assert next(iter(read_rows(log, "m", columns=["label", "time"]))).schema.names == ["label", "time"]


def test_find_row(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    assert find_row(log, "r2", 0) == {"image_sha256": digest(2), "bundle_version": "v1", "model": "m"}
    assert find_row(log, "r2", 1) is None and find_row(log, "r", 0) is None


@pytest.mark.parametrize("name", [None, "digits"])
def test_a_log_without_rows_says_which_folder_is_meant(tmp_path: Path, name: str | None) -> None:
    log = open_log(tmp_path / "none")
    with pytest.raises(UsageError, match=r"none has no rows; give the folder that psc-serve --log writes$"):
        logged_model(log, name)


def test_a_model_of_several_is_named(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    assert logged_model(log, "m") == logged_model(log, None) == "m"
    with pytest.raises(UsageError, match=r"has no rows of model x; it has m, name one by --model$"):
        logged_model(log, "x")


def test_damaged_file_is_named(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.put("model=m/day=2026-03-01/part-z.parquet", b"PAR1 torn")
    with pytest.raises(DataError, match=r"part-z\.parquet is not a file of rows"):
        list(read_rows(log, "m"))
