import csv
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from psc_core.cli.log import main
from psc_core.log.labels import label_files, read_label_file, read_labels
from psc_core.log.store import LoggedModel, model_path
from psc_core.tasks.classification import Classification
from tests.psc_core.log.support import content, digest, make_log, put_rows, row


def test_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = make_log(tmp_path / "log", 4)
    where, tasks = str(tmp_path / "log"), tmp_path / "tasks.csv"
    assert main(["review", where, "--csv", str(tasks), "--out", str(tmp_path / "tasks.json"), "--limit", "3"]) == 0
    assert capsys.readouterr().out == "3 images, 0 of them of the random sample\n"
    with tasks.open(newline="") as file:
        assert all(Path(line["image"]).is_file() for line in csv.DictReader(file))  # people open it
    assert main(["import", where, str(tasks)]) == 2
    assert "has no answer" in capsys.readouterr().err
    tasks.write_text(tasks.read_text().replace("False,\n", "False,cat\n"))
    for expected in (3, 0):  # An unchanged file is no error.
        assert main(["import", where, str(tasks)]) == 0
        assert f"log: {expected} labels added" in capsys.readouterr().out
        ((file, _),) = label_files(log)
        assert len(read_label_file(log, file)) == 3
    assert main(["import", where, str(tasks), "--model", "other"]) == 2
    assert "has no answer for other" in capsys.readouterr().err
    assert main(["review", where, "--csv", str(tasks)]) == 2
    assert "tasks.csv already; give --overwrite" in capsys.readouterr().err
    assert "False,cat" in tasks.read_text(), "what people wrote there"
    assert main(["review", where, "--csv", str(tasks), "--overwrite"]) == 0
    assert "1 images" in capsys.readouterr().out
    assert main(["delete", where, digest(0)]) == 0
    assert "removed 1 files" in capsys.readouterr().out
    assert main(["prune", where, "--days", "7"]) == 0
    assert "1 files of rows, 0 images" in capsys.readouterr().out


def test_folders_of_two_models_are_imported_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both answers are right, but folders name no model."""
    log, folders = make_log(tmp_path / "log", 1), tmp_path / "folders"
    put_rows(log, [row(0, bundle_version="o1")], model="other")
    log.put(model_path("o1"), LoggedModel("o1", Classification(), ("lion",)).to_json())
    said = {"m": "cat", "other": "none_of_the_classes"}
    for model, text in said.items():
        for folder in (folders / model / text, folders / "both" / text):
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(content(0))
    assert main(["import", str(tmp_path / "log"), str(folders / "both")]) == 2
    assert "review and import each model by itself, with --model" in capsys.readouterr().err
    for model in said:
        for command in (["review", "--csv", f"{tmp_path}/{model}.csv"], ["import", str(folders / model)]):
            assert main([command[0], str(tmp_path / "log"), *command[1:], "--model", model]) == 0
    labels = read_labels(log)
    found = [labels.of(model, "r0", 0, digest(0)) for model in said]
    assert [each and (each.kind, each.label) for each in found] == [("label", "cat"), ("none_of_the_classes", None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["review", "LOG"], "nothing to write"),
        (["review", "LOG", "--out", "x.json", "--model", "other"], "no rows of model other"),
        (["delete", "LOG", "ab"], "64 hexadecimal digits"),
        (["import", "LOG", "missing.csv"], "is not a file"),
        (["prune", "gs://x/y", "--days", "1"], "expected a folder or s3://"),
    ],
)
def test_bad_usage_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    make_log(tmp_path)
    assert main([str(tmp_path) if each == "LOG" else each for each in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_full_disk_of_the_log_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write alone does not say where it was, and the folder of temporary files is not to blame."""
    make_log(tmp_path / "log", 1)
    (tmp_path / "x.csv").write_text("request_id,image_index,label\nr0,0,cat\n")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr("tempfile.tempdir", "/temporary")
    assert main(["import", str(tmp_path / "log"), str(tmp_path / "x.csv")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "log" / "labels") in error and "/temporary" not in error
